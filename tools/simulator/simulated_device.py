"""A simulated device at work: what a round truly takes of it, and what it makes of that."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Self

from msgspec.structs import replace

from fleetune.edge_agent.budget.cost_forecast import demand
from fleetune.edge_agent.budget.owner_policy import Policy, objection
from fleetune.edge_agent.budget.ratio_controller import RatioController
from fleetune.firmware_profiles import UNKNOWN
from fleetune.protocols.conditions import Conditions
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.skeletons.choice import DeviceReport
from fleetune.tools.simulator.battery import Battery
from fleetune.tools.simulator.simulated_fleet import SimulatedDevice

Turn = tuple[int, int]


@dataclass(frozen=True)
class Answer:
    """A reply made at a ratio, what the device expected of the round, and what that took so far."""

    data: bytes
    ratio: float
    predicted: RoundCost
    taken: RoundCost


@dataclass
class Player:
    """A device on the virtual clock.

    Attributes:
        device: its board and link.
        ratio_controller: what it can afford, as it knows itself.
        policy: of its owner.
        flops_per_sample: of one training step on the fleet's model.
        battery: None: it is on the mains.
        there: whether it is connected.
        told: the report that the coordinator has.
        job: the training at hand, in a worker.
        working: the task it is at.
        answered: replies that may still be asked for again.
    """

    device: SimulatedDevice
    ratio_controller: RatioController
    policy: Policy
    flops_per_sample: float
    battery: Battery | None = None
    there: bool = True
    told: DeviceReport | None = None
    job: Future[bytes] | None = None
    working: Turn | None = None
    answered: dict[Turn, Answer] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        device: SimulatedDevice,
        ratio_controller: RatioController,
        policy: Policy,
        flops_per_sample: float,
    ) -> Self:
        """At the start of a run, its first ratio chosen."""
        board, battery = device.board, None
        if device.charge is not None and board.battery_wh is not None:
            battery = Battery(board.battery_wh * 3600, device.charge, board.idle_w)
        player = cls(device, ratio_controller, policy, flops_per_sample, battery)
        player.ratio_controller = ratio_controller.chosen(player.conditions)
        return player

    @property
    def name(self) -> str:
        return self.device.name

    @property
    def report(self) -> DeviceReport:
        """The latest."""
        return self.ratio_controller.report

    @property
    def conditions(self) -> Conditions:
        """How its board is."""
        known = self.device.board.name != UNKNOWN
        return Conditions(
            memory_bytes=self.device.board.memory_bytes if known else None,
            power="mains" if self.battery is None else "battery",
            battery=None if self.battery is None else self.battery.charge,
        )

    @property
    def refusal(self) -> str | None:
        """Why it takes no part just now; None: it does."""
        against = objection(self.policy, self.conditions, self.device.board)
        return against or (None if self.ratio_controller.fits else self.report.reason)

    @property
    def train_s(self) -> float:
        """How long its work truly takes at its present ratio, evaluations included."""
        ratio = self.report.ratio
        choice = next(one for one in self.ratio_controller.choices if one.ratio == ratio)
        gflops = self.device.board.training_gflops * self.device.speed
        return (
            demand(choice, self.ratio_controller.capability).samples * self.flops_per_sample / (gflops * 1e9)
        )

    def sent(self, answered: Answer, upload_s: float) -> RoundCost:
        """What the round takes in all when its reply is sent in `upload_s`."""
        board, before = self.device.board, answered.taken
        joules = (
            board.receive_w * (before.download_s or 0)
            + board.train_w * (before.train_s or 0)
            + board.transmit_w * upload_s
        )
        return replace(before, bytes_up=len(answered.data), upload_s=upload_s, joules=joules)

    def spend(self, taken: RoundCost, now: float) -> None:
        """Off its battery: a round's joules, of which idling would have drawn a part."""
        if self.battery is not None:
            idle_j = self.battery.idle_w * taken.known_s
            self.battery.drain(now, max(0.0, (taken.joules or 0) - idle_j))

    @property
    def is_flat(self) -> bool:
        """Its battery is empty: it is gone for good."""
        return self.battery is not None and self.battery.is_empty

    def learn(self, ratio: float, taken: RoundCost) -> None:
        """From a round done to its end at `ratio`: choose again."""
        self.ratio_controller = self.ratio_controller.learned(ratio, taken).chosen(self.conditions)

    def try_again(self) -> None:
        """After a while in which nothing fitted."""
        self.ratio_controller = self.ratio_controller.declining().chosen(self.conditions)

    @property
    def is_news(self) -> bool:
        """Whether the coordinator should hear of the present report."""
        return self.told is None or self.ratio_controller.is_news(self.told)
