"""From an enrolment on disk to taking part: what joining waits for, one run at a time."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import fleetune.protocols.wire.messages as wire
from fleetune.edge_agent.budget.board_meter import BoardMeter
from fleetune.edge_agent.budget.policy_guard import PolicyGuard
from fleetune.edge_agent.probes.link_speed import LinkSpeed
from fleetune.edge_agent.run.jobs import Jobs, Joined
from fleetune.edge_agent.run.joining import DeviceSettings, join
from fleetune.edge_agent.run.membership import Membership
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.edge_agent.training.trainers import Trainers, needs_bundle
from fleetune.protocols.errors import ModelError, TrainingStopped

log = logging.getLogger(__name__)

AGAIN_S = 10.0


class Enrolling:
    """Joins runs in the jobs' thread, when the owner lets it and what a run needs is here.

    Args:
        settings: of this device.
        store: its state.
        meter: of its board.
        guard: knows what the owner allows.
        jobs: `Joined` follows there.
        measure_link: asked once a run.
        why_stop: of a run, asked by local training before every batch.
        send: a message to the coordinator.
        decline: a run: what is declined, and why.
        clock: seconds that never jump.

    Raises:
        SettingError: there is no such trainer.
        ModelError: it is not installed, or none is.
    """

    def __init__(
        self,
        settings: DeviceSettings,
        store: AgentStore,
        meter: BoardMeter,
        guard: PolicyGuard,
        jobs: Jobs,
        *,
        measure_link: Callable[[], LinkSpeed],
        why_stop: Callable[[str], str | None],
        send: Callable[[wire.Message], None],
        decline: Callable[[str, str, BaseException], None],
        clock: Callable[[], float],
    ) -> None:
        self._settings, self._store, self._meter, self._guard = settings, store, meter, guard
        self._jobs, self._measure_link, self._why_stop = jobs, measure_link, why_stop
        self._send, self._decline, self._clock = send, decline, clock
        self._trainers = Trainers(settings.trainer)
        self._dealt: dict[str, float | None] = {}
        self._joining: str | None = None
        self._postponed: tuple[str, str] | None = None  # a run to join later, and why not now
        self.wake_at: float | None = None

    def begin(self, run: str) -> None:
        """Join a run whose enrolment is on disk, or see to what that takes first."""
        if (reason := self._guard.objection()) is not None:
            self._postpone(run, reason)
        elif self._joining != run:
            self._prepare(run)

    def note_dealt(self, run: str, ratio: float | None) -> None:
        """The run deals this device no larger ratio; None: it leaves the choice to the device."""
        self._dealt[run] = ratio

    def do_without_bundle(self, run: str, reason: str) -> None:
        """The coordinator has no bundle of this run."""
        if self._store.enrolment(run).read() is not None:
            self._trainers.lacking[run] = wire.readable(reason)
            self.begin(run)

    def tick(self, now: float) -> None:
        """Has the board's state changed so that a postponed run can be joined?"""
        if self.wake_at is not None and now >= self.wake_at:
            self.wake_at = None
            if self._postponed is not None:
                self.begin(self._postponed[0])

    def joined(self, event: Joined) -> Membership | None:
        """What joining has come to; None: nothing, and whoever must know has been told."""
        if event.run != self._joining:
            return None
        self._joining = None
        problem = event.outcome.exception()
        if isinstance(problem, TrainingStopped) and (reason := self._guard.objection()) is not None:
            self._postpone(event.run, reason)
        elif problem is not None:
            self._decline(event.run, f"cannot join run {event.run}", problem)
        return event.outcome.result() if problem is None else None

    def forget(self, run: str) -> None:
        """It is over."""
        if self._postponed is not None and self._postponed[0] == run:
            self._postponed = None
        if self._joining == run:
            self._joining = None
        self._dealt.pop(run, None)

    def _prepare(self, run: str) -> None:
        """Join, or ask for the bundle; this comes again when it is here."""
        try:
            kind = self._trainers.kind(run)
        except ModelError as problem:
            self._decline(run, f"cannot join run {run}", problem)
            return
        if needs_bundle(kind) and self._store.bundle(run) is None:
            self._send(wire.Fetch(run))
            return
        self._joining, self._postponed = run, None
        joining = partial(
            join,
            replace(self._settings, policy=self._settings.policy.at_most(self._dealt.get(run))),
            self._store,
            run,
            self._store.enrolment(run).read() or b"",
            kind=kind,
            meter=self._meter,
            measure_link=self._measure_link,
            stop=lambda: self._why_stop(run),
            progress=self._jobs.progress,
        )
        self._jobs.join(run, joining)

    def _postpone(self, run: str, reason: str) -> None:
        """Joining measures how fast this board trains; that too is for when the owner lets it."""
        if self._postponed != (run, reason):
            self._decline(run, "not joining yet", TrainingStopped(reason))
        self._postponed, self.wake_at = (run, reason), self._clock() + AGAIN_S
