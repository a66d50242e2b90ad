"""The coordinator's event loop: takes events from one queue and handles them in transactions.

One thread does everything. A payload is written to disk before it is acknowledged. A step of the run is
stored before any device or observer learns of it. Events that wait together form one transaction. The cost of
an event does not grow with the fleet.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import fleetune.protocols.wire.messages as wire
from fleetune.coordinator.broker.known_devices import KnownDevices
from fleetune.coordinator.commands.control_file import read_control
from fleetune.coordinator.rounds.events import ClockSet, Paused, Tick
from fleetune.coordinator.run.observers import Observers
from fleetune.coordinator.run.run_clock import RunClock
from fleetune.coordinator.run.run_events import Moment, RunBegan, RunLeft
from fleetune.coordinator.run.stored_run import Run
from fleetune.coordinator.serving.control_watch import ControlWatch
from fleetune.coordinator.serving.disk_space import KEEP_PARTS_S, remove_old_parts
from fleetune.coordinator.serving.event_queue import EventQueue, Stop, TimerDue
from fleetune.coordinator.serving.finish_announcement import FinishAnnouncement
from fleetune.coordinator.serving.serving_parts import ServingParts
from fleetune.coordinator.store.broker_outage import write_outage
from fleetune.coordinator.store.troubles import forget_troubles
from fleetune.protocols.wire.transport import EventSink, Transport
from fleetune.protocols.wire.transport.backlog import Backlog

LOOK_EVERY_S = 0.5
RUN_END_S = 10.0
MAX_WAITING_BYTES = 256 * 2**20


@dataclass
class Server:
    """Serves one run until it is finished or stopped.

    Attributes:
        run: the run.
        fleet: name of the fleet.
        make_transport: function that returns an unconnected transport, which puts its events into the given
            queue.
        observers: receive the events of the run, once these are durable.
        clock: the run's clock (see `RunClock`), in seconds; it also advances while no coordinator runs.
        timer: a monotonic clock for transfers, in seconds.
        ahead_s: function that returns how many seconds the time of day is ahead of the run's clock.
        not_now: see `ControlWatch`.
        events: the queue of events, with a limit in bytes.
        devices: the identities of the broker's devices.
        parts: the parts that exchange messages with devices.
    """

    run: Run
    fleet: str
    make_transport: Callable[[EventSink], Transport]
    observers: Observers = field(default_factory=Observers)
    clock: Callable[[], float] = field(default_factory=RunClock)
    timer: Callable[[], float] = time.monotonic
    ahead_s: Callable[[], float] = lambda: 0.0
    not_now: frozenset[str] = frozenset()
    events: Backlog = field(default_factory=partial(Backlog, MAX_WAITING_BYTES))
    devices: KnownDevices = field(default_factory=KnownDevices)

    def __post_init__(self) -> None:
        self._queue = EventQueue(self.events, self.timer)
        self._transport = self.make_transport(self.events)
        self.parts = ServingParts.of(
            self.run,
            self.fleet,
            self._transport,
            self.events.put,
            self.observers,
            self.clock,
            self.timer,
            self._queue.timers,
            self.devices,
        )

    @property
    def finished(self) -> str | None:
        """Why the run is over; None while it goes on."""
        return self.parts.exchange.finished

    @property
    def reopens(self) -> bool:
        """True if serving stopped only to change the stored run."""
        return self._queue.reopens

    def serve(self) -> str | None:
        """Serve the run; return why it is over, or None if it was stopped before its end.

        Raises:
            StoreError: the state of the run cannot be written. The next start continues from the last state
                that was written.
        """
        run, records = self.run, self.run.controller.records()
        self.observers.tell(RunBegan(run.enrolment.run, run.settings, records, simulated=False))
        try:
            return self._serve()
        finally:
            self.observers.tell(RunLeft())

    def resume(self) -> None:
        """Continue the run where an earlier process stopped, and clear the problems that it recorded."""
        write_outage(self.run.store, None)
        forget_troubles(self.run.store)
        self.parts.exchange.resume()

    def moment(self) -> Moment:
        """Return the present state for live views: time, outage of the broker, and activities of devices."""
        outage = self.parts.messages.outage
        problem = None if outage is None else outage.words(time.time())
        return Moment(self.clock(), problem, self.parts.sessions.activities)

    def _serve(self) -> str | None:
        remove_old_parts(self.run.folder, but=set(), older_than_s=KEEP_PARTS_S)
        try:
            self.resume()
            self._transport.connect()
            self._serve_until_over()
            if self.finished is not None:
                self._announce_end(self.finished)
            elif self.reopens:
                for device in read_control(self.run.folder).forget:
                    self.parts.exchange.transfers.clear_presence(device)
        finally:
            self._transport.close()
        return self.finished

    def _announce_end(self, reason: str) -> None:
        finish = wire.Finish(self.run.enrolment.run, reason)
        joining = self.parts.joining
        end = FinishAnnouncement(self._transport, self.fleet, finish, joining.present, joining.absent)
        end.say(self.events, until=self.timer() + RUN_END_S, timer=self.timer)

    def _serve_until_over(self) -> None:
        look_at, control = float("-inf"), ControlWatch(self.run, self.ahead_s, self.not_now)
        while self.finished is None and not self._queue.stopped:
            with self.parts.batch.committed(self.run.store):
                self._handle_all(self._queue.take(self._wait_s))
                for event in control.look(self.timer()):
                    self._handle(event)
            began = self.timer()
            self.parts.admission.look(began, self.events.take_dropped())
            if began >= look_at:
                self.parts.look(self.timer())
                self.observers.tell(self.moment())
                # Live views get at most 5 % of the time, however long they take in a large fleet.
                look_at = began + max(LOOK_EVERY_S, 20 * (self.timer() - began))

    @property
    def _wait_s(self) -> float:
        """Return the seconds until the engine or a live view is due."""
        wake_at = self.run.controller.wake_at
        return LOOK_EVERY_S if wake_at is None else min(LOOK_EVERY_S, wake_at - self.clock())

    def _handle_all(self, events: list[Any]) -> None:
        for event in events:
            if self.finished is None:
                self._handle(event)
            else:
                self.events.put(event)  # the announcement of the end reads the answers among them
        if self._wait_s <= 0:
            self.parts.exchange.report(Tick())

    def _handle(self, event: Any) -> None:
        if isinstance(event, TimerDue):
            self.parts.exchange.wake(self._queue.due())
        elif isinstance(event, Stop):
            self.events.put(event)
        elif isinstance(event, ClockSet | Paused):
            self.parts.exchange.report(event)
        else:
            self.parts.messages.handle(event)
