"""The run's bundle for devices without torch, made in a process of its own when the first one asks."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fleetune.coordinator.run.child_process import in_child_process
from fleetune.coordinator.run.models import make_run_bundle
from fleetune.coordinator.run.stored_run import BUNDLE, Run
from fleetune.protocols.errors import FleetuneError
from fleetune.protocols.user_code import as_line

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BundleMade:
    """Making the bundle has come to an end: its bytes, or why there is none."""

    payload: bytes | None
    problem: str = ""


class BundleServer:
    """Answers those who ask for the bundle.

    Args:
        run: whose bundle.
        put: takes `BundleMade`, from the maker's thread.
        say: what people should know.
    """

    def __init__(self, run: Run, put: Callable[[Any], None], say: Callable[[str], None]) -> None:
        self._run, self._put, self._say = run, put, say
        self._waiting: set[str] = set()
        self._making = False
        self._problem: str | None = None

    @property
    def problem_line(self) -> str | None:
        """Why devices without torch cannot take part; None: they can, as far as is known."""
        if self._problem is None:
            return None
        return f"devices without torch cannot take part, no bundle can be made: {self._problem}"

    def ask(self, device: str) -> BundleMade | None:
        """What to tell the device; None: it is told when the bundle is made. Raises StoreError."""
        payload = self._run.store.get(BUNDLE)
        if payload is not None:
            return BundleMade(payload)
        if self._problem is not None:
            return BundleMade(None, self._problem)
        self._waiting.add(device)
        if not self._making:
            self._making = True
            self._say(f"a bundle of {self._run.settings.model.name} is made for devices without torch")
            threading.Thread(target=self._make, name="bundle", daemon=True).start()
        return None

    def made(self, event: BundleMade) -> set[str]:
        """Keep what was made; who waits to be told. Raises StoreError."""
        self._making, self._problem = False, None if event.payload else event.problem
        if event.payload is None:
            log.warning("%s", self.problem_line)
        else:
            with self._run.store.step():
                self._run.store.put(BUNDLE, event.payload)
            self._say(f"the bundle is there: {len(event.payload):,} bytes, every graph compared with torch")
        waiting, self._waiting = self._waiting, set()
        return waiting

    def _make(self) -> None:
        try:
            made = in_child_process("the bundle", make_run_bundle, self._run.settings)
            self._put(BundleMade(made.for_devices(self._run.enrolment.spec).encoded()))
        except FleetuneError as problem:
            self._put(BundleMade(None, str(problem)))
        except Exception as problem:  # noqa: BLE001 - devices wait for an answer, whatever it is
            self._put(BundleMade(None, as_line(problem)))
