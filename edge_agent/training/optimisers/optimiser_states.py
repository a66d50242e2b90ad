"""What the optimiser of a device remembers from round to round, where `optimiser_state` is `device`."""

from fleetune.edge_agent.training.optimisers.optimiser import OptimiserState

States = tuple[OptimiserState, ...]


class RoundOptimiserStates:
    """One state for each local training of a round, in their order: a method may train several models, or
    parts of one after the other, and the n-th of a round goes on with what the n-th remembered last.

    Args:
        before: what is kept from earlier rounds, left alone.
    """

    def __init__(self, before: States) -> None:
        self._before = before
        self._after: States = ()

    def next(self) -> OptimiserState:
        """To begin the next local training with."""
        number = len(self._after)
        return self._before[number] if number < len(self._before) else OptimiserState(())

    def put(self, state: OptimiserState) -> None:
        """What that local training ended with."""
        self._after = (*self._after, state)

    @property
    def after(self) -> States:
        """To be kept when the round's work is done; a local training that it did without keeps its own."""
        return (*self._after, *self._before[len(self._after) :])
