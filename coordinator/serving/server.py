"""The coordinator's loop around its dialogue with the devices: transport, queue, clock and transactions.

One thread, one queue. Every payload is on disk before it is acknowledged, every step of the run before
anybody is told of it. Events that wait together are one transaction, and none costs more in a larger fleet.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import fleetune.protocols.wire.messages as wire
from fleetune.coordinator.rounds.events import ClockSet, Paused, Tick
from fleetune.coordinator.run.observers import Observers
from fleetune.coordinator.run.run_clock import RunClock
from fleetune.coordinator.run.run_events import (
    RunBegan,
    RunLeft,
)
from fleetune.coordinator.run.stored_run import Run
from fleetune.coordinator.serving.control_watch import ControlWatch
from fleetune.coordinator.serving.dialogue import Dialogue
from fleetune.coordinator.serving.disk_space import KEEP_PARTS_S, remove_old_parts
from fleetune.coordinator.serving.event_queue import EventQueue, Stop, TimerDue
from fleetune.coordinator.serving.finish_announcement import FinishAnnouncement
from fleetune.protocols.wire.transport import EventSink, Transport
from fleetune.protocols.wire.transport.backlog import Backlog

LOOK_EVERY_S = 0.5
RUN_END_S = 10.0
MAX_WAITING_BYTES = 256 * 2**20


@dataclass
class Server:
    """Serves one run until it is finished or told to stop.

    Attributes:
        run: the run.
        fleet: its devices listen there.
        make_transport: from the queue of events, a transport that is not connected yet.
        observers: told of what happens, once it is durable.
        clock: of the run, see `RunClock`: a deadline goes on while the coordinator is not there.
        timer: seconds that never jump, for everything on the wire.
        ahead_s: by how much the time of day is ahead of the run's clock, see `RunClock`.
        dialogue: with its devices.
    """

    run: Run
    fleet: str
    make_transport: Callable[[EventSink], Transport]
    observers: Observers = field(default_factory=Observers)
    clock: Callable[[], float] = field(default_factory=RunClock)
    timer: Callable[[], float] = time.monotonic
    ahead_s: Callable[[], float] = lambda: 0.0
    events: Backlog = field(default_factory=partial(Backlog, MAX_WAITING_BYTES))

    def __post_init__(self) -> None:
        self._queue = EventQueue(self.events, self.timer)
        self.dialogue = Dialogue(
            self.run,
            self.fleet,
            self._publish,
            self.events.put,
            self.observers,
            self.clock,
            self.timer,
            self._queue.timers,
        )

    @property
    def finished(self) -> str | None:
        """Why the run is over; None: it is not."""
        return self.dialogue.finished

    def serve(self) -> str | None:
        """Serve; why the run is over, None if it was stopped before.

        Raises:
            StoreError: the run's state cannot be written; the run goes on from before at the next start.
        """
        run, records = self.run, self.run.controller.records()
        self.observers.tell(RunBegan(run.enrolment.run, run.settings, records, simulated=False))
        try:
            return self._serve()
        finally:
            self.observers.tell(RunLeft())

    def _serve(self) -> str | None:
        self._transport = self.make_transport(self.events)
        remove_old_parts(self.run.folder, but=set(), older_than_s=KEEP_PARTS_S)
        try:
            self.dialogue.resume()
            self._transport.connect()
            self._serve_until_over()
            if self.finished is not None:
                self._announce_end(self.finished)
        finally:
            self._transport.close()
        return self.finished

    def _announce_end(self, reason: str) -> None:
        finish = wire.Finish(self.run.enrolment.run, reason)
        dialogue = self.dialogue
        run_end = FinishAnnouncement(self._transport, self.fleet, finish, dialogue.present, dialogue.absent)
        run_end.say(self.events, until=self.timer() + RUN_END_S, timer=self.timer)

    def _serve_until_over(self) -> None:
        look_at, control = float("-inf"), ControlWatch(self.run, self.ahead_s)
        while self.finished is None and not self._queue.stopped:
            with self.dialogue.burst.committed(self.run.store):
                self._handle_all(self._queue.take(self._wait_s))
                for event in control.look(self.timer()):
                    self._handle(event)
            began = self.timer()
            self.dialogue.gate.look(began, self.events.take_dropped())
            if began >= look_at:
                self.dialogue.look()
                self.observers.tell(self.dialogue.moment())
                look_at = began + max(LOOK_EVERY_S, 20 * (self.timer() - began))  # looking takes 5 % at most

    @property
    def _wait_s(self) -> float:
        """Until the engine or a live view has something to do."""
        wake_at = self.run.controller.wake_at
        return LOOK_EVERY_S if wake_at is None else min(LOOK_EVERY_S, wake_at - self.clock())

    def _handle_all(self, events: list[Any]) -> None:
        for event in events:
            if self.finished is None:
                self._handle(event)
            else:
                self.events.put(event)  # for the announcement of the end
        if self._wait_s <= 0:
            self.dialogue.tell(Tick())

    def _handle(self, event: Any) -> None:
        if isinstance(event, TimerDue):
            self.dialogue.wake(self._queue.due())
        elif isinstance(event, Stop):
            self.events.put(event)
        elif isinstance(event, ClockSet | Paused):
            self.dialogue.tell(event)
        else:
            self.dialogue.handle(event)

    def _publish(self, topic: str, data: bytes, retain: bool = False) -> None:
        self._transport.publish(topic, data, retain=retain)
