"""Serves the run's bundle to devices without torch. A child process makes it when the first device asks."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fleetune.coordinator.run.child_process import in_child_process
from fleetune.coordinator.run.models import make_run_bundle
from fleetune.coordinator.run.stored_run import BUNDLE, Run
from fleetune.protocols.bundle.bundle import Bundle, read_bundle
from fleetune.protocols.errors import FleetuneError
from fleetune.protocols.user_code import as_line
from fleetune.protocols.wire.capabilities import Features

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BundleMade:
    """The result of making the bundle: its bytes, or the reason why it cannot be made.

    Attributes:
        payload: the bytes of the bundle; None if it cannot be made.
        problem: the reason why the bundle cannot be made; "" if it can.
        needed: the features that an agent needs to read the bundle.
    """

    payload: bytes | None
    problem: str = ""
    needed: Features = Features()  # noqa: RUF009 - frozen

    @classmethod
    def of(cls, bundle: Bundle) -> "BundleMade":
        """Encode the bundle for devices."""
        operators = {op for graph in bundle.graphs.values() for op in graph.operators}
        return cls(bundle.encoded(), needed=Features(operators=tuple(sorted(operators))))


class BundleServer:
    """Makes the run's bundle once, and returns it to each device that asks.

    Args:
        run: the run whose bundle is made.
        put: receives `BundleMade` from the thread that waits for the child process.
        say: prints a line on the console.
    """

    def __init__(self, run: Run, put: Callable[[Any], None], say: Callable[[str], None]) -> None:
        self._run, self._put, self._say = run, put, say
        self._waiting: set[str] = set()
        self._making = False
        self._problem: str | None = None
        self._made: BundleMade | None = None

    @property
    def problem_line(self) -> str | None:
        """Why devices without torch cannot take part; None if no problem is known."""
        if self._problem is None:
            return None
        return f"devices without torch cannot take part, no bundle can be made: {self._problem}"

    def ask(self, device: str) -> BundleMade | None:
        """Return the bundle for a device, or None while it is being made. Raises StoreError."""
        if self._made is None and (payload := self._run.store.get(BUNDLE)) is not None:
            self._made = BundleMade.of(read_bundle(payload))  # an earlier process stored it
        if self._made is not None:
            return self._made
        if self._problem is not None:
            return BundleMade(None, self._problem)
        self._waiting.add(device)
        if not self._making:
            self._making = True
            self._say(f"a bundle of {self._run.settings.model.name} is made for devices without torch")
            threading.Thread(target=self._make, name="bundle", daemon=True).start()
        return None

    def made(self, event: BundleMade) -> set[str]:
        """Store the finished bundle, and return the devices that wait for it. Raises StoreError."""
        self._making, self._problem = False, None if event.payload else event.problem
        if event.payload is None:
            log.warning("%s", self.problem_line)
        else:
            with self._run.store.step():
                self._run.store.put(BUNDLE, event.payload)
            self._made = event
            self._say(f"the bundle is there: {len(event.payload):,} bytes, every graph compared with torch")
        waiting, self._waiting = self._waiting, set()
        return waiting

    def _make(self) -> None:
        try:
            made = in_child_process("the bundle", make_run_bundle, self._run.settings)
            self._put(BundleMade.of(made.for_devices(self._run.enrolment.spec)))
        except FleetuneError as problem:
            self._put(BundleMade(None, str(problem)))
        except Exception as problem:  # noqa: BLE001 - devices wait for an answer, whatever it is
            self._put(BundleMade(None, as_line(problem)))
