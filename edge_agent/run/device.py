"""The device that takes part: what its owner decides, what it keeps, and how its board is."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from fleetune.edge_agent.budget.board_meter import BoardMeter
from fleetune.edge_agent.budget.owner_policy import Policy
from fleetune.edge_agent.budget.policy_guard import PolicyGuard
from fleetune.edge_agent.probes.link_speed import LinkSpeed
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.edge_agent.stream.sample_stream import SampleStream
from fleetune.edge_agent.training.trainers import AUTO
from fleetune.protocols.settings.section import PROCESSOR


@dataclass(frozen=True)
class DeviceSettings:
    """What the owner of a device decides.

    Attributes:
        fleet, device: names.
        data: source of the device's own samples, see `edge_agent.training.device_data.load`.
        state: folder of the agent's state.
        board: firmware profile.
        test_fraction: of its samples, held out as its own test split when the source marks none.
        threads: processor threads of training.
        policy: what the owner allows.
        trainer: "auto" or one of `edge_agent.training.trainers.KINDS`.
        train_on: what it computes on, see `edge_agent.training.trainers.make_backend`.
        trusted: modules of the owner's own whose code a run may name (`package.module`).
        publish: file that the served model is written to, for an app; None: as before, or nowhere.
        publish_mode: permissions of that file; None: as before, or as the umask says.
    """

    fleet: str
    device: str
    data: str
    state: Path
    board: str = "generic"
    test_fraction: float = 0.3
    threads: int = 1
    policy: Policy = Policy()  # noqa: RUF009 - frozen
    trainer: str = AUTO
    train_on: str = PROCESSOR
    trusted: tuple[str, ...] = ()
    publish: Path | None = None
    publish_mode: int | None = None


@dataclass(frozen=True)
class Device:
    """A device, on which an agent runs.

    Attributes:
        settings: its owner's.
        store: what it keeps; claimed by this agent.
        meter: of its board.
        guard: knows what its owner allows just now.
        measure_link: the way to the broker, asked once a run, when nothing else is under way.
        stream: its samples, where they come by and by; None: `settings.data` has all of them.
    """

    settings: DeviceSettings
    store: AgentStore
    meter: BoardMeter
    guard: PolicyGuard
    measure_link: Callable[[], LinkSpeed] = LinkSpeed
    stream: SampleStream | None = None

    def at_most(self, ratio: float | None) -> "Device":
        """As if its owner allowed no larger ratio; None: as it is."""
        settings = replace(self.settings, policy=self.settings.policy.at_most(ratio))
        return replace(self, settings=settings)
