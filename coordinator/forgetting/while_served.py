"""Serves a run in sessions. Between two of them, devices are removed that its owner asked to forget."""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from typing import Any

from fleetune.coordinator.broker.known_devices import KnownDevices
from fleetune.coordinator.commands.commands import wait_for_removal
from fleetune.coordinator.commands.control_file import read_control
from fleetune.coordinator.forgetting.forget_in_run import do_requests
from fleetune.coordinator.run.child_process import in_child_process
from fleetune.coordinator.run.open_or_resume import open_run
from fleetune.coordinator.run.stored_run import Run
from fleetune.protocols.errors import FleetuneError

log = logging.getLogger(__name__)

ServeOne = Callable[[Run, Any, frozenset[str]], bool]


def serve_forgetting(
    run: Run, serve_one: ServeOne, follow: Callable[[], AbstractContextManager[Any]], devices: KnownDevices
) -> None:
    """Serve a run until it is finished or stopped.

    A session ends when the owner asks to forget a device. The run's store is then closed, changed by a child
    process, and opened again, as after a restart; the broker and the connections of all devices stay.

    Args:
        run: the open run.
        serve_one: serves the run in one session, with its trackers and the devices whose removal must wait;
            returns True if the session ended to forget a device.
        follow: returns the trackers of one session.
        devices: the devices of the broker.
    """
    not_now = frozenset[str]()
    while True:
        with closing(run.store), follow() as following:
            if not serve_one(run, following, not_now):
                return
        devices.catch_up()  # so that a revoked device is disconnected first
        try:
            in_child_process("forgetting a device", do_requests, run.folder, time.time())
        except KeyboardInterrupt:
            log.warning("stopped while it forgets a device; the next start completes that")
            return
        except FleetuneError as problem:
            not_now = frozenset(read_control(run.folder).forget)
            log.warning("cannot forget %s now: %s; the next start tries again", ", ".join(not_now), problem)
        wait_for_removal(run.folder)  # `forget` may have been faster than the child process
        run = open_run(run.settings, run.folder)
