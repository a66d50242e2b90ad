"""A simulated device: the agent's own planner, and a model of its board, link and battery."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Self

from fleetune.coordinator.rounds.events import DeviceReady
from fleetune.edge_agent.budget.cost_forecast import demand
from fleetune.edge_agent.budget.owner_policy import Policy, reason_not_to_train
from fleetune.edge_agent.run.round_planner import RoundPlanner, RoundWork
from fleetune.edge_agent.stream.sample_stream import DataStatistics
from fleetune.firmware_profiles import UNKNOWN, Board
from fleetune.protocols.conditions import Conditions
from fleetune.protocols.method.choice import Budget
from fleetune.protocols.round_cost import RoundCost
from fleetune.tools.simulator.device_specs import DeviceSpec
from fleetune.tools.simulator.first_choices import FirstChoice
from fleetune.tools.simulator.jobs import TrainingResult

Turn = tuple[int, int]


@dataclass(frozen=True)
class FinishedReply:
    """An encoded `Reply` and its costs."""

    reply: bytes
    work: RoundWork


@dataclass
class Battery:
    """A battery that is never charged.

    Attributes:
        capacity_j: energy when full.
        charge: remaining fraction, 0..1.
        idle_w: constant idle power; work is added to it.
        seen_at: time of the latest `drain`, on the virtual clock.
    """

    capacity_j: float
    charge: float
    idle_w: float
    seen_at: float = 0.0

    @property
    def is_empty(self) -> bool:
        return self.charge <= 0

    def drain(self, now: float, joules: float = 0.0) -> None:
        """Subtract `joules` of work, and idle energy for the time since the last call."""
        idle_j = self.idle_w * max(0.0, now - self.seen_at)
        self.seen_at = max(now, self.seen_at)
        self.charge = max(0.0, self.charge - (joules + idle_j) / self.capacity_j)


@dataclass(frozen=True)
class DeviceSnapshot:
    """The state of a `SimulatedDevice`, as a checkpoint stores it."""

    planner: RoundPlanner
    battery: Battery | None
    connected: bool
    working: Turn | None
    replies: list[tuple[Turn, FinishedReply]]
    base: str | None
    sends_until: float
    figures: DataStatistics | None = None
    deliveries: int = 0


@dataclass
class SimulatedDevice:
    """A device on the virtual clock.

    Attributes:
        spec: its board and link.
        planner: the agent's own choices and predictions.
        policy: limits that its owner sets.
        flops_per_sample: operations of one training step on the fleet's model, for one sample.
        battery: its battery; None if it has mains power.
        connected: True if the coordinator can reach it.
        job: its training in a worker, as a future.
        working: its present task.
        replies: replies that the coordinator may request again, by (round, attempt).
        figures: statistics of its data, if they grow.
        deliveries: number of sample deliveries so far.
        base: digest of its model, if tasks are differences to that model.
        sends_until: arrival time of its latest reply, on the virtual clock.
    """

    spec: DeviceSpec
    planner: RoundPlanner
    policy: Policy
    flops_per_sample: float
    battery: Battery | None = None
    connected: bool = True
    job: Future[TrainingResult] | None = None
    working: Turn | None = None
    replies: dict[Turn, FinishedReply] = field(default_factory=dict)
    figures: DataStatistics | None = None
    deliveries: int = 0
    base: str | None = None
    sends_until: float = 0.0

    @classmethod
    def of(
        cls,
        spec: DeviceSpec,
        first_choice: FirstChoice,
        policy: Policy,
        flops_per_sample: float,
        *,
        compact: bool = False,
        base: str | None = None,
    ) -> Self:
        """Return the device at the start of a run, with its first ratio chosen."""
        board, battery = spec.board, None
        if spec.charge is not None and board.battery_wh is not None:
            battery = Battery(board.battery_wh * 3600, spec.charge, board.idle_w)
        planner = RoundPlanner(first_choice(_conditions(board, battery)), compact=compact)
        return cls(spec, planner, policy, flops_per_sample, battery, base=base)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def state(self) -> DeviceSnapshot:
        """The complete state, without the job."""
        return DeviceSnapshot(
            planner=self.planner,
            battery=self.battery,
            connected=self.connected,
            working=self.working,
            replies=list(self.replies.items()),
            base=self.base,
            sends_until=self.sends_until,
            figures=self.figures,
            deliveries=self.deliveries,
        )

    def restore(self, state: DeviceSnapshot) -> None:
        """Restore a stored state."""
        self.planner, self.battery = state.planner, state.battery
        self.connected, self.working, self.replies = state.connected, state.working, dict(state.replies)
        self.base, self.sends_until = state.base, state.sends_until
        self.figures, self.deliveries = state.figures, state.deliveries

    @property
    def conditions(self) -> Conditions:
        """Present memory and power of the board."""
        return _conditions(self.spec.board, self.battery)

    @property
    def refusal(self) -> str | None:
        """Why the device does not take part now; None if it does."""
        return reason_not_to_train(self.policy, self.conditions, self.spec.board) or self.planner.refusal

    def is_idle(self, now: float) -> bool:
        """True if the device neither works on a task nor sends a reply."""
        return self.working is None and now >= self.sends_until

    def note_samples(self, now: float, *, claimed: int = 0) -> bool:
        """Pass grown data to the planner; True if the coordinator needs a report, see `RoundPlanner`."""
        found = self.figures
        return found is not None and self.planner.note_samples(
            found.num_samples, found.new_samples, found.drift, now_s=now, claimed=claimed
        )

    def train_s(self, budget: Budget, round_attempt: Turn) -> float:
        """Return the seconds of the device's work in this round with this budget, evaluations included."""
        controller = self.planner.ratio_controller
        choice = next(one for one in controller.choices if one.ratio == budget.ratio)
        gflops = self.spec.board.training_gflops * self.spec.speed
        samples = demand(choice, controller.capability, budget.local_work).samples
        return self.spec.slowness(round_attempt) * samples * self.flops_per_sample / (gflops * 1e9)

    def sent(self, work: RoundWork, upload_s: float) -> RoundWork:
        """Return the costs of the whole round, including a reply that takes `upload_s` to send."""
        board, taken = self.spec.board, work.taken
        joules = (
            board.receive_w * (taken.download_s or 0)
            + board.train_w * (taken.train_s or 0)
            + board.transmit_w * upload_s
        )
        return work.sent(upload_s, joules)

    def spend(self, taken: RoundCost, now: float) -> None:
        """Drain a round's joules from the battery; they include idle power for the same time."""
        if self.battery is not None:
            idle_j = self.battery.idle_w * taken.known_s
            self.battery.drain(now, max(0.0, (taken.joules or 0) - idle_j))

    def ready(self) -> DeviceReady:
        """Return the event with the device's report to the coordinator."""
        return DeviceReady(self.planner.tell(), self.base)

    @property
    def drift(self) -> float | None:
        """The drift that the device reports; None if unknown."""
        return None if self.figures is None else self.figures.drift

    @property
    def is_flat(self) -> bool:
        """True if the battery is empty; the device then never returns."""
        return self.battery is not None and self.battery.is_empty


def _conditions(board: Board, battery: Battery | None) -> Conditions:
    return Conditions(
        memory_bytes=board.memory_bytes if board.name != UNKNOWN else None,
        power="mains" if battery is None else "battery",
        battery=None if battery is None else battery.charge,
    )


class Fleet:
    """The devices of a run by name, with a record of those that the next checkpoint must store.

    Args:
        devices: the devices in the order in which they enrol.
    """

    def __init__(self, devices: Iterable[SimulatedDevice]) -> None:
        self._devices = {device.name: device for device in devices}
        self._changed: set[str] = set()
        self._with_replies: set[str] = set()

    def __len__(self) -> int:
        return len(self._devices)

    def __iter__(self) -> Iterator[SimulatedDevice]:
        return iter(self._devices.values())

    def changing(self, name: str) -> SimulatedDevice:
        """Return a device and mark it as changed."""
        self._changed.add(name)
        return self._devices[name]

    def all_changing(self) -> None:
        """Mark every device as changed."""
        self._changed.update(self._devices)

    def take_changed(self) -> list[SimulatedDevice]:
        """Return the devices that changed since the last call, ascending."""
        changed, self._changed = self._changed, set()
        return [self._devices[name] for name in sorted(changed)]

    def keep_reply(self, device: SimulatedDevice, round_attempt: Turn, made: FinishedReply) -> None:
        """Store a reply that the coordinator may request again."""
        device.replies[round_attempt] = made
        self._with_replies.add(device.name)

    @property
    def with_replies(self) -> list[SimulatedDevice]:
        """Return the devices with stored replies, ascending."""
        return [self._devices[name] for name in sorted(self._with_replies)]

    def forget_replies(self, awaited_attempt: Callable[[str], Turn | None]) -> None:
        """Discard replies to tasks that the coordinator no longer waits for.

        Args:
            awaited_attempt: function that returns the (round, attempt) that a device has to answer, or None.
        """
        before = self.with_replies
        for device in before:
            awaited = awaited_attempt(device.name)
            device.replies = {
                round_attempt: made
                for round_attempt, made in device.replies.items()
                if round_attempt == awaited
            }
        self._with_replies = {device.name for device in before if device.replies}
        self._changed.update(device.name for device in before)

    def restore(self, device: SimulatedDevice, state: DeviceSnapshot) -> None:
        """Restore a device to a stored state."""
        device.restore(state)
        if device.replies:
            self._with_replies.add(device.name)
