"""A synthetic device and the real costs of its rounds, to test its predictions and learning."""

import dataclasses
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from msgspec.structs import replace

from fleetune.edge_agent.budget.cost_forecast import (
    BoardWatts,
    Capability,
    LinkRates,
    ModelSize,
    demand,
    predict,
)
from fleetune.edge_agent.budget.cost_history import CostHistory
from fleetune.edge_agent.budget.owner_policy import Limits
from fleetune.edge_agent.budget.ratio_choice import RatioDecision, decide
from fleetune.protocols.method.choice import Choice, Cost
from fleetune.protocols.round_cost import RoundCost

CHOICES = [Choice(p / 10, Cost(bytes_down=p * 100_000, bytes_up=p * 100_000)) for p in range(1, 11)]
CAPABILITY = Capability(
    num_samples=100,
    epochs=2,
    batch_size=16,
    model=ModelSize(1_000_000, 50_000),
    samples_per_s=50.0,
    link=LinkRates(1.1e6, 10e6),
    base_bytes=200_000_000,
    watts=BoardWatts(receive=2.0, train=5.0, transmit=3.0),
)


def behind(**link: float | None) -> Capability:
    """CAPABILITY with a different link."""
    return dataclasses.replace(CAPABILITY, link=dataclasses.replace(CAPABILITY.link, **link))


@dataclass(frozen=True)
class World:
    """Real costs of a device's rounds. Every value differs from CAPABILITY.

    Attributes:
        uplink_bps, downlink_bps, latency_s: the link.
        samples_per_s, overhead_s: local work.
        shrink: actual bytes over the bytes that the method estimates.
        base_bytes: memory of the process, instead of CAPABILITY's.
        watts: constant power.
        noise: standard deviation of the logarithm of all seconds.
    """

    uplink_bps: float = 0.5e6
    downlink_bps: float = 5e6
    latency_s: float = 0.3
    samples_per_s: float = 20.0
    overhead_s: float = 0.5
    shrink: float = 0.8
    base_bytes: int = 260_000_000
    watts: float = 7.0
    noise: float = 0.0

    def round(self, choice: Choice, rng: np.random.Generator) -> RoundCost:
        asked = demand(choice, CAPABILITY)
        down, up = round(asked.bytes_down * self.shrink), round(asked.bytes_up * self.shrink)
        seconds = (
            self.latency_s + down * 8 / self.downlink_bps,
            self.overhead_s + asked.samples / self.samples_per_s,
            self.latency_s + up * 8 / self.uplink_bps,
        )
        noisy = np.array(seconds) * np.exp(self.noise * rng.normal(size=3))
        download_s, train_s, upload_s = noisy.tolist()
        return RoundCost(
            bytes_down=down,
            bytes_up=up,
            download_s=download_s,
            train_s=train_s,
            upload_s=upload_s,
            memory_bytes=self.base_bytes + asked.working_bytes,
            joules=self.watts * (download_s + train_s + upload_s),
            processor_s=seconds[1] / 4,
        )


@dataclass
class Device:
    """A device that chooses an option for every round and learns from each.

    Attributes:
        world: real costs of its rounds; may be changed between rounds.
        limits: limits of each of its rounds.
        choices: options that its method offers.
    """

    world: World
    limits: Limits
    choices: tuple[Choice, ...] = tuple(CHOICES)
    cost_history: CostHistory = field(default_factory=CostHistory)
    ratio: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)

    @property
    def decision(self) -> RatioDecision:
        forecast = partial(predict, capability=CAPABILITY, cost_history=self.cost_history)
        return decide(self.choices, forecast, self.limits, wanted=1.0, current=self.ratio)

    def play(self, **stray: float | None) -> tuple[RoundCost, RoundCost] | None:
        """Run one round; return its predicted and actual costs, the latter with `stray` values. None:
        declined.
        """
        decision = self.decision
        if decision.choice is None:
            self.cost_history, self.ratio = self.cost_history.declining(), None
            return None
        self.ratio = decision.choice.ratio
        return decision.predicted, self.learn(decision.choice, **stray)

    def learn(self, choice: Choice, **stray: float | None) -> RoundCost:
        """Run a round with this choice and learn its actual costs with `stray` values; return the actual
        costs.
        """
        actual = self.world.round(choice, self._rng)
        self.cost_history = self.cost_history.learned(demand(choice, CAPABILITY), replace(actual, **stray))
        return actual
