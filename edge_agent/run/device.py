"""The device that takes part: its owner's settings, its stored state, and its board."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from fleetune.edge_agent.budget.board_meter import BoardMeter
from fleetune.edge_agent.budget.owner_policy import Policy
from fleetune.edge_agent.budget.policy_guard import PolicyGuard
from fleetune.edge_agent.probes.board_profile import board_named
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
        publish: file that the deployed model is written to, for an app; None: unchanged, or nowhere.
        publish_mode: permissions of that file; None: unchanged, or as the umask says.
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
        stream: its samples, where its data grow; None: `settings.data` has all of them.
        lock: its state folder, held while the agent runs.
    """

    settings: DeviceSettings
    store: AgentStore
    meter: BoardMeter
    guard: PolicyGuard
    measure_link: Callable[[], LinkSpeed] = LinkSpeed
    stream: SampleStream | None = None
    lock: IO[bytes] | None = None

    @classmethod
    def opened(
        cls,
        settings: DeviceSettings,
        *,
        meter: BoardMeter | None = None,
        measure_link: Callable[[], LinkSpeed] = LinkSpeed,
        make_stream: Callable[[], SampleStream] | None = None,
        lock: IO[bytes] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> "Device":
        """The device with its state folder claimed.

        Args:
            settings: its owner's.
            meter: of its board; None: of this machine.
            measure_link: called once a run, when nothing else is under way.
            make_stream: opens its samples, where its data grow, once the folder is held.
            lock: the state folder, held already; None: it is claimed here.
            clock: seconds that never jump.

        Raises:
            SettingError: there is no such board.
            StoreError: the state folder cannot be used, or another agent uses it.
        """
        meter, store = meter or BoardMeter(), AgentStore(settings.state)
        guard = PolicyGuard(settings.policy, board_named(settings.board), meter, clock=clock)
        held = store.claim() if lock is None else lock
        stream = None if make_stream is None else make_stream()
        return cls(settings, store, meter, guard, measure_link, stream, held)

    def close(self) -> None:
        """Release the samples and the state folder."""
        if self.stream is not None:
            self.stream.close()
        if self.lock is not None:
            self.lock.close()

    def at_most(self, ratio: float | None) -> "Device":
        """The device as if its owner allowed no larger ratio; None: unchanged."""
        settings = replace(self.settings, policy=self.settings.policy.at_most(ratio))
        return replace(self, settings=settings)
