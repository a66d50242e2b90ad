"""The device that takes part: its owner's settings, its stored state, and its board."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from fleetune.edge_agent.budget.board_meter import BoardMeter
from fleetune.edge_agent.budget.owner_policy import Policy
from fleetune.edge_agent.budget.policy_guard import PolicyGuard
from fleetune.edge_agent.joining.joined_fleet import Credentials
from fleetune.edge_agent.probes.board_profile import board_named
from fleetune.edge_agent.probes.link_speed import LinkSpeed
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.edge_agent.state.state_folder import label
from fleetune.edge_agent.stream.sample_stream import SampleStream
from fleetune.edge_agent.training.trainers import AUTO
from fleetune.protocols.settings.section import PROCESSOR
from fleetune.protocols.wire.identity import Identity


@dataclass(frozen=True)
class DeviceSettings:
    """Settings that the owner of a device chooses.

    Attributes:
        fleet: name of the fleet.
        device: id of the device.
        name: the device's name for people; None for the stored one.
        data: source of the device's own samples, see `edge_agent.datasets.sources.load`.
        state: folder of the agent's state.
        board: name of the firmware profile.
        test_fraction: fraction of the samples held out as the device's test split, if the source marks none.
        threads: number of processor threads for training.
        policy: limits that the owner sets.
        trainer: "auto" or one of `edge_agent.training.trainers.KINDS`.
        train_on: hardware to train on, see `edge_agent.training.trainers.make_backend`.
        trusted: the owner's own modules whose code a run may name (`package.module`).
        publish: file to which the deployed model is written for an app; None keeps the stored choice, if any.
        publish_mode: permissions of that file; None keeps the stored choice, or else applies the umask.
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
    name: str | None = None

    @property
    def identity(self) -> Identity:
        """The device's id and name."""
        return Identity(self.device, self.name or self.device)


@dataclass(frozen=True)
class Device:
    """A device, on which an agent runs.

    Attributes:
        settings: its owner's settings.
        store: its stored state, claimed by this agent.
        meter: meter of its board.
        guard: checks what the owner's policy allows at the moment.
        measure_link: measures the link to the broker; called once a run while nothing else is in progress.
        stream: its growing samples; None if `settings.data` has all samples.
        lock: lock file of the state folder, held while the agent runs.
        credentials: its key and certificates; None if it has joined no fleet.
    """

    settings: DeviceSettings
    store: AgentStore
    meter: BoardMeter
    guard: PolicyGuard
    measure_link: Callable[[], LinkSpeed] = LinkSpeed
    stream: SampleStream | None = None
    lock: IO[bytes] | None = None
    credentials: Credentials | None = None

    @classmethod
    def opened(
        cls,
        settings: DeviceSettings,
        *,
        meter: BoardMeter | None = None,
        measure_link: Callable[[], LinkSpeed] = LinkSpeed,
        make_stream: Callable[[], SampleStream] | None = None,
        lock: IO[bytes] | None = None,
        credentials: Credentials | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> "Device":
        """Claim the state folder and return the device.

        Args:
            settings: its owner's settings.
            meter: meter of its board; None for this machine.
            measure_link: measures the link; called once a run while nothing else is in progress.
            make_stream: opens the growing samples once the folder is claimed; None if the data do not grow.
            lock: lock file of a state folder that is already claimed; None to claim the folder here.
            credentials: its key and certificates; None if it has joined no fleet.
            clock: monotonic clock, in seconds.

        Raises:
            SettingError: there is no such board.
            StoreError: the state folder cannot be used, or another agent uses it.
        """
        meter, store = meter or BoardMeter(), AgentStore(settings.state)
        guard = PolicyGuard(settings.policy, board_named(settings.board), meter, clock=clock)
        held = store.claim() if lock is None else lock
        settings = replace(settings, name=label(settings.state, settings.name))
        stream = None if make_stream is None else make_stream()
        return cls(settings, store, meter, guard, measure_link, stream, held, credentials)

    def close(self) -> None:
        """Release the samples and the state folder."""
        if self.stream is not None:
            self.stream.close()
        if self.lock is not None:
            self.lock.close()

    def at_most(self, ratio: float | None) -> "Device":
        """Return the same device with an upper bound on its ratio; None for no bound."""
        settings = replace(self.settings, policy=self.settings.policy.at_most(ratio))
        return replace(self, settings=settings)
