"""The run's bundle for devices without torch, made in a thread of its own when the first one asks."""

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fleetune.coordinator.run.models import make_run_bundle
from fleetune.coordinator.run.stored_run import BUNDLE, Run
from fleetune.protocols.errors import FleetuneError

log = logging.getLogger(__name__)


_THREAD = "bundle"


@contextmanager
def left_unmade() -> Iterator[None]:
    """Let the process end inside this while a bundle is made: at once, with its exit code.

    Python stops threads at its end where they stand, and torch, there in C++, would abort the process.
    """
    try:
        yield
    except SystemExit as end:
        _end(end.code if isinstance(end.code, int) else 1)
        raise
    _end(0)


def _end(code: int) -> None:
    if any(thread.name == _THREAD for thread in threading.enumerate()):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@dataclass(frozen=True)
class BundleMade:
    """Making the bundle has come to an end: its bytes, or why there is none."""

    payload: bytes | None
    problem: str = ""


class BundleDesk:
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
            threading.Thread(target=self._make, name=_THREAD, daemon=True).start()
        return None

    def made(self, event: BundleMade) -> set[str]:
        """Keep what was made; who waits to be told. Raises StoreError."""
        self._making, self._problem = False, None if event.payload else event.problem
        if event.payload is None:
            log.warning("devices without torch cannot take part: %s", event.problem)
        else:
            with self._run.store.step():
                self._run.store.put(BUNDLE, event.payload)
            self._say(f"the bundle is there: {len(event.payload):,} bytes, every graph compared with torch")
        waiting, self._waiting = self._waiting, set()
        return waiting

    def _make(self) -> None:
        try:
            made = make_run_bundle(self._run.settings).for_devices(self._run.enrolment.spec)
            self._put(BundleMade(made.encoded()))
        except FleetuneError as problem:
            self._put(BundleMade(None, str(problem)))
        except Exception as problem:  # a user's model may raise anything, and nobody else would say so
            log.exception("the bundle cannot be made")
            self._put(
                BundleMade(None, f"unexpected {type(problem).__name__}; the coordinator's log has more")
            )
