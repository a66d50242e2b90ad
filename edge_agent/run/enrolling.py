"""Joins runs one at a time: fetches missing payloads, and waits while the owner's policy forbids joining.

Methods return the messages for the coordinator.
"""

import logging
from collections import Counter
from functools import partial
from typing import Literal

import fleetune.protocols.wire.messages as wire
from fleetune.edge_agent.run.decline import declined
from fleetune.edge_agent.run.device import Device
from fleetune.edge_agent.run.jobs import Jobs, Joined
from fleetune.edge_agent.run.joined_run import JoinedRun
from fleetune.edge_agent.run.joining import join
from fleetune.edge_agent.state.frozen_tensors import BackboneLacking
from fleetune.edge_agent.stream.sample_stream import TooFewSamples
from fleetune.edge_agent.training.trainers import Trainers, needs_bundle
from fleetune.protocols.errors import ModelError, StoreError, TrainingStopped
from fleetune.protocols.wire.messages import TransferKey

log = logging.getLogger(__name__)

AGAIN_S = 10.0
MOST_ARRIVALS = 3  # most fetches of a run's bundle or backbone that is still missing after it was stored
SAMPLES_AGAIN_S = 2.0  # short, because checking for new samples costs little


class Enrolling:
    """Joins runs in the jobs' thread, once the owner's policy allows it and all payloads are stored.

    Args:
        device: the device that joins.
        jobs: the jobs' thread; each join ends with a `Joined` event.

    Attributes:
        finished: the last finished run, unless that run was extended.
        wake_at: time of the next call of `tick`; None for never.

    Raises:
        SettingError: there is no such trainer.
        ModelError: the trainer is not installed, or cannot compute on the chosen hardware.
    """

    def __init__(self, device: Device, jobs: Jobs) -> None:
        self._device, self._jobs = device, jobs
        self._trainers = Trainers(device.settings.trainer, train_on=device.settings.train_on)
        self._assigned: dict[str, float | None] = {}
        self._arrivals = Counter[tuple[str, str]]()  # number of fetches by run and kind
        self._joining: str | None = None
        self._postponed: tuple[str, str] | None = None  # a postponed run and the reason
        self._said: tuple[str, str] | None = None  # the same, as last reported to the coordinator
        self.finished: str | None = None
        self.wake_at: float | None = None

    def enrol(self, run: str, now: float) -> wire.Message | None:
        """Join a run whose enrolment is stored, or first fetch the missing payloads."""
        if self.finished == run:
            log.warning("run %s continues, although it was reported as finished; joining it again", run)
            self.finished = None  # the coordinator raised its number of rounds
        return self._begin(run, now)

    def note_assigned(self, run: str, ratio: float | None) -> None:
        """Record the largest ratio that the run assigns to this device; None if the device chooses."""
        self._assigned[run] = ratio

    def note_arrived(self, key: TransferKey) -> None:
        """Record that a run's bundle or backbone was stored."""
        self._arrivals[key.run, key.kind] += 1

    def do_without_bundle(self, run: str, reason: str, now: float) -> wire.Message | None:
        """Join with a trainer that needs no bundle, because the coordinator has none for this run."""
        if self._device.store.enrolment(run).read() is None:
            return None
        self._trainers.lacking[run] = wire.readable(reason)
        return self._begin(run, now)

    def tick(self, now: float) -> wire.Message | None:
        """Join a postponed run if the board's state now allows it."""
        if self.wake_at is None or now < self.wake_at:
            return None
        self.wake_at = None
        return None if self._postponed is None else self._begin(self._postponed[0], now)

    def joined(self, event: Joined, now: float) -> JoinedRun | wire.Message | None:
        """Handle the end of a join: return the joined run, a message for the coordinator, or None."""
        if event.run != self._joining:
            return None
        self._joining = None
        problem = event.joined.exception()
        if problem is None:
            self._said = None
            return event.joined.result()
        if (
            isinstance(problem, TrainingStopped)
            and (reason := self._device.guard.reason_not_to_train()) is not None
        ):
            return self._postpone(event.run, reason, now)
        if isinstance(problem, TooFewSamples):
            return self._postpone(event.run, str(problem), now, SAMPLES_AGAIN_S)
        if isinstance(problem, BackboneLacking):
            log.info("%s", problem)
            return self._fetch(event.run, "backbone")
        return _declined(event.run, f"cannot join run {event.run}", problem)

    def finish(self, run: str) -> None:
        """Record that a run is over."""
        self.finished = run
        if self._postponed is not None and self._postponed[0] == run:
            self._postponed = None
        if self._joining == run:
            self._joining = None
        self._assigned.pop(run, None)

    def _begin(self, run: str, now: float) -> wire.Message | None:
        if (reason := self._device.guard.reason_not_to_train()) is not None:
            return self._postpone(run, reason, now)
        return None if self._joining == run else self._prepare(run)

    def _prepare(self, run: str) -> wire.Message | None:
        """Join, or ask for the bundle; this is called again once the bundle is stored."""
        store = self._device.store
        try:
            kind = self._trainers.kind(run)
        except ModelError as problem:
            return _declined(run, f"cannot join run {run}", problem)
        if needs_bundle(kind) and store.bundle(run) is None:
            return self._fetch(run, "bundle")
        self._joining, self._postponed = run, None
        joining = partial(
            join,
            self._device.at_most(self._assigned.get(run)),
            run,
            store.enrolment(run).read() or b"",
            kind=kind,
            stop=partial(self._why_stop, run),
            progress=self._jobs.progress,
        )
        self._jobs.join(run, joining)
        return None

    def _fetch(self, run: str, what: Literal["bundle", "backbone"]) -> wire.Message:
        """Return the request for a payload; decline if it arrived several times and cannot be read from the
        disk.
        """
        if self._arrivals[run, what] < MOST_ARRIVALS:
            return wire.Fetch(run, what)
        self._arrivals.pop((run, what))
        problem = StoreError(f"the {what} came {MOST_ARRIVALS} times and cannot be read back: check the disk")
        return _declined(run, f"cannot join run {run}", problem)

    def _why_stop(self, run: str) -> str | None:
        """Return the reason why training has to stop; None if it may continue.

        The jobs' thread calls this before every batch.
        """
        if self._jobs.closing:
            return "the agent stops"
        return "the run is finished" if self.finished == run else self._device.guard.reason_not_to_train()

    def _postpone(self, run: str, reason: str, now: float, again_s: float = AGAIN_S) -> wire.Message | None:
        """Plan to join after `again_s`; return a message for the coordinator if the reason is new."""
        self._postponed, self.wake_at = (run, reason), now + again_s
        if self._said == self._postponed:
            return None
        self._said = self._postponed
        return _declined(run, "not joining yet", TrainingStopped(reason))


def _declined(run: str, what: str, problem: BaseException) -> wire.Decline:
    return declined(TransferKey("enrolment", run), what, problem)
