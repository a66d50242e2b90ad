"""A simulated device at work: what a round truly takes of it. Its own part in the run is the agent's code."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Self

from fleetune.coordinator.rounds.events import DeviceReady
from fleetune.edge_agent.budget.cost_forecast import demand
from fleetune.edge_agent.budget.owner_policy import Policy, objection
from fleetune.edge_agent.run.round_planner import RoundPlanner, RoundWork
from fleetune.edge_agent.stream.sample_stream import Figures
from fleetune.firmware_profiles import UNKNOWN, Board
from fleetune.protocols.conditions import Conditions
from fleetune.protocols.method.choice import Budget
from fleetune.protocols.round_cost import RoundCost
from fleetune.tools.simulator.first_choices import FirstChoice
from fleetune.tools.simulator.jobs import TrainingResult
from fleetune.tools.simulator.power.battery import Battery
from fleetune.tools.simulator.simulated_fleet import DeviceSpec

Turn = tuple[int, int]


@dataclass(frozen=True)
class FinishedReply:
    """An encoded `Reply`, and the work that it took."""

    reply: bytes
    work: RoundWork


@dataclass(frozen=True)
class DeviceSnapshot:
    """What changes of a `SimulatedDevice`, to be written down."""

    membership: RoundPlanner
    battery: Battery | None
    there: bool
    working: Turn | None
    replies: list[tuple[Turn, FinishedReply]]
    base: str | None
    sends_until: float
    figures: Figures | None = None
    turns: int = 0


@dataclass
class SimulatedDevice:
    """A device on the virtual clock.

    Attributes:
        device: its board and link.
        membership: its part in the run, as it knows itself.
        policy: of its owner.
        flops_per_sample: of one training step on the fleet's model.
        battery: None: it is on the mains.
        there: whether it is connected.
        job: the training at hand, in a worker.
        working: the task it is at.
        replies: those that may still be asked for again.
        figures: of its data, where they grow, as they are now.
        turns: of samples that have come.
        base: digest of what it holds of the model, where tasks are differences to that.
        sends_until: its latest reply is on its way until then, on the virtual clock.
    """

    device: DeviceSpec
    membership: RoundPlanner
    policy: Policy
    flops_per_sample: float
    battery: Battery | None = None
    there: bool = True
    job: Future[TrainingResult] | None = None
    working: Turn | None = None
    replies: dict[Turn, FinishedReply] = field(default_factory=dict)
    figures: Figures | None = None
    turns: int = 0
    base: str | None = None
    sends_until: float = 0.0

    @classmethod
    def of(
        cls,
        device: DeviceSpec,
        first_choice: FirstChoice,
        policy: Policy,
        flops_per_sample: float,
        *,
        compact: bool = False,
    ) -> Self:
        """At the start of a run, its first ratio chosen."""
        board, battery = device.board, None
        if device.charge is not None and board.battery_wh is not None:
            battery = Battery(board.battery_wh * 3600, device.charge, board.idle_w)
        chosen = first_choice(_conditions(board, battery))
        return cls(device, RoundPlanner(chosen, compact=compact), policy, flops_per_sample, battery)

    @property
    def name(self) -> str:
        return self.device.name

    @property
    def state(self) -> DeviceSnapshot:
        """As it stands, its job aside."""
        return DeviceSnapshot(
            membership=self.membership,
            battery=self.battery,
            there=self.there,
            working=self.working,
            replies=list(self.replies.items()),
            base=self.base,
            sends_until=self.sends_until,
            figures=self.figures,
            turns=self.turns,
        )

    def restore(self, state: DeviceSnapshot) -> None:
        """Take over what it was."""
        self.membership, self.battery = state.membership, state.battery
        self.there, self.working, self.replies = state.there, state.working, dict(state.replies)
        self.base, self.sends_until = state.base, state.sends_until
        self.figures, self.turns = state.figures, state.turns

    @property
    def conditions(self) -> Conditions:
        """How its board is."""
        return _conditions(self.device.board, self.battery)

    @property
    def refusal(self) -> str | None:
        """Why it takes no part just now; None: it does."""
        return objection(self.policy, self.conditions, self.device.board) or self.membership.refusal

    def is_idle(self, now: float) -> bool:
        """Neither working on a task nor sending its reply."""
        return self.working is None and now >= self.sends_until

    def note_samples(self, now: float, *, claimed: int = 0) -> bool:
        """Look at data that grow; whether the coordinator should hear of them, see `RoundPlanner`."""
        found = self.figures
        return found is not None and self.membership.note_samples(
            found.num_samples, found.new_samples, found.drift, now_s=now, claimed=claimed
        )

    def train_s(self, budget: Budget, turn: Turn) -> float:
        """How long its work truly takes at one of its ratios, evaluations included, in this round."""
        controller = self.membership.ratio_controller
        choice = next(one for one in controller.choices if one.ratio == budget.ratio)
        gflops = self.device.board.training_gflops * self.device.speed
        samples = demand(choice, controller.capability, budget.local_work).samples
        return self.device.slowness(turn) * samples * self.flops_per_sample / (gflops * 1e9)

    def sent(self, work: RoundWork, upload_s: float) -> RoundWork:
        """The round in all when its reply is sent in `upload_s`."""
        board, taken = self.device.board, work.taken
        joules = (
            board.receive_w * (taken.download_s or 0)
            + board.train_w * (taken.train_s or 0)
            + board.transmit_w * upload_s
        )
        return work.sent(upload_s, joules)

    def spend(self, taken: RoundCost, now: float) -> None:
        """Off its battery: a round's joules, of which idling would have drawn a part."""
        if self.battery is not None:
            idle_j = self.battery.idle_w * taken.known_s
            self.battery.drain(now, max(0.0, (taken.joules or 0) - idle_j))

    def ready(self) -> DeviceReady:
        """What it tells the coordinator of itself."""
        return DeviceReady(self.membership.tell(), self.base)

    @property
    def drift(self) -> float | None:
        """What it tells of drift."""
        return None if self.figures is None else self.figures.drift

    @property
    def is_flat(self) -> bool:
        """Its battery is empty: it is gone for good."""
        return self.battery is not None and self.battery.is_empty


def _conditions(board: Board, battery: Battery | None) -> Conditions:
    return Conditions(
        memory_bytes=board.memory_bytes if board.name != UNKNOWN else None,
        power="mains" if battery is None else "battery",
        battery=None if battery is None else battery.charge,
    )


class RepeatableReplies:
    """The devices of a fleet that have replies which may be asked for again."""

    def __init__(self, fleet: Mapping[str, SimulatedDevice]) -> None:
        self._fleet = fleet
        self._names = {name for name, player in fleet.items() if player.replies}

    def add(self, player: SimulatedDevice) -> None:
        """It has one now."""
        self._names.add(player.name)

    @property
    def players(self) -> list[SimulatedDevice]:
        """Themselves, ascending."""
        return [self._fleet[name] for name in sorted(self._names)]

    def forget(self, awaited_turn: Callable[[str], Turn | None]) -> list[str]:
        """Replies to tasks that nobody waits for any more; the names of all that had some.

        Args:
            awaited_turn: the task that a device is expected to answer; None: none.
        """
        before = self.players
        for player in before:
            awaited = awaited_turn(player.name)
            player.replies = {turn: made for turn, made in player.replies.items() if turn == awaited}
        self._names = {player.name for player in before if player.replies}
        return [player.name for player in before]
