"""A device's optimiser states from round to round, if `optimiser_state` is `device`."""

from fleetune.edge_agent.training.optimisers.optimiser import OptimiserState

States = tuple[OptimiserState, ...]


class RoundOptimiserStates:
    """One optimiser state for each local training of a round, in order.

    A method may train several models or parts in a round. The n-th training continues with the state of the
    n-th training in the round before.

    Args:
        before: states of earlier rounds, which stay unchanged.
    """

    def __init__(self, before: States) -> None:
        self._before = before
        self._after: States = ()

    def next(self) -> OptimiserState:
        """Return the state from which the round's next local training starts."""
        number = len(self._after)
        return self._before[number] if number < len(self._before) else OptimiserState(())

    def put(self, state: OptimiserState) -> None:
        """Store the state after the local training that `next` started."""
        self._after = (*self._after, state)

    @property
    def after(self) -> States:
        """Return the states to store after the round. A local training that did not run keeps its earlier
        state.
        """
        return (*self._after, *self._before[len(self._after) :])
