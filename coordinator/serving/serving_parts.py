"""Builds the parts of a coordinator that exchange messages with devices."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from fleetune.coordinator.broker.known_devices import KnownDevices
from fleetune.coordinator.run.observers import Observers
from fleetune.coordinator.run.run_events import Notice
from fleetune.coordinator.run.stored_run import Run
from fleetune.coordinator.serving.admission import Admission, message_buckets
from fleetune.coordinator.serving.bundle_server import BundleServer
from fleetune.coordinator.serving.device_messages import DeviceMessages
from fleetune.coordinator.serving.device_sessions import DeviceSessions
from fleetune.coordinator.serving.event_batch import EventBatch
from fleetune.coordinator.serving.event_queue import Timers
from fleetune.coordinator.serving.joining import Joining
from fleetune.coordinator.serving.rejected_messages import RejectedMessages
from fleetune.coordinator.serving.renewals import Renewals
from fleetune.coordinator.serving.requested_files import RequestedFiles
from fleetune.coordinator.serving.task_exchange import TaskExchange
from fleetune.coordinator.serving.transfers import Transfers
from fleetune.protocols.wire.transport import Transport


@dataclass(frozen=True)
class ServingParts:
    """The parts of a coordinator that exchange messages with devices. Each part uses only those above it.

    Attributes:
        batch: joins several events into one transaction.
        sessions: the sessions of all devices.
        rejected: counts and logs rejected messages.
        exchange: sends tasks, and reports replies and other events to the run controller.
        joining: enrols devices.
        renewals: renews certificates.
        files: sends bundle and backbone.
        admission: decides which messages are read.
        messages: reads messages, and passes each to one of the parts above.
    """

    batch: EventBatch
    sessions: DeviceSessions
    rejected: RejectedMessages
    exchange: TaskExchange
    joining: Joining
    renewals: Renewals
    files: RequestedFiles
    admission: Admission
    messages: DeviceMessages

    @classmethod
    def of(
        cls,
        run: Run,
        fleet: str,
        transport: Transport,
        put: Callable[[Any], None],
        observers: Observers,
        clock: Callable[[], float],
        timer: Callable[[], float],
        timers: Timers,
        devices: KnownDevices | None = None,
    ) -> Self:
        """Return the parts that serve one run.

        Args:
            run: the run.
            fleet: name of the fleet.
            transport: the connection to the broker.
            put: puts events from other threads into the server's queue.
            observers: receive the events of the run, once these are durable.
            clock: the run's clock, in seconds.
            timer: a monotonic clock for transfers, in seconds.
            timers: the time of each session's next timer.
            devices: the identities of the broker's devices.
        """
        controller = run.controller
        batch, sessions, budget = EventBatch(), DeviceSessions(), message_buckets()
        rejected = RejectedMessages(controller.count_refused, timer, sessions.identity)
        transfers = Transfers(transport, fleet, batch, timers, sessions, budget)
        exchange = TaskExchange(run, sessions, transfers, rejected, observers, batch, clock, timer)
        known = devices or KnownDevices()
        joining = Joining(run, sessions, exchange, rejected, known)
        renewals = Renewals(known, sessions, transfers, rejected, put)
        bundles = BundleServer(run, put, lambda line: observers.tell(Notice(line)))
        files = RequestedFiles(run, sessions, exchange, bundles)
        admission = Admission(controller, sessions, budget, timer, joining.note_throttled, joining.forget)
        messages = DeviceMessages(run, admission, exchange, joining, renewals, files, rejected)
        return cls(batch, sessions, rejected, exchange, joining, renewals, files, admission, messages)

    def look(self, now: float) -> None:
        """Handle changes that depend on time alone, such as the end of throttling; `now` is on the timer."""
        self.files.end_if_untrainable(now)
        self.joining.look(now)
        self.renewals.look(now)
