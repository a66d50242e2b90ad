"""A user's generator function, whose samples are kept as they come, in threads of their own.

It yields x, (x, y), (x, y, id), or a dict of these. It is called anew when it fails, after a while; where it
goes on from is its own business: a sample that is kept already is not kept twice.
"""

import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fleetune.edge_agent.stream.intakes.library_call import SampleQueue
from fleetune.edge_agent.stream.sample import BadSample, make_sample
from fleetune.edge_agent.stream.sample_store import SampleStore
from fleetune.protocols.errors import DataError
from fleetune.protocols.one_line import without_url
from fleetune.protocols.user_code import as_line, user_module

AGAIN_S, LONGEST_S = 5.0, 600.0

log = logging.getLogger(__name__)

Generator = Callable[[], Iterator[Any]]


def find_generator(source: str) -> Generator | None:
    """The generator function that `package.module:function` names; None: it names something else.

    Raises:
        DataError: its module cannot be imported.
    """
    module, _, name = source.partition(":")
    try:
        found = getattr(user_module(module), name, None)
    except Exception as problem:  # a user's file may raise anything
        raise DataError(f"data.source `{without_url(source)}`: {as_line(problem)}") from problem
    return found if inspect.isgeneratorfunction(found) else None


class GeneratorIntake:
    """Takes samples from a generator function until told to stop.

    Args:
        store: of the device.
        generator: of the user.
        source: as the user wrote it, for messages.
    """

    def __init__(self, store: SampleStore, generator: Generator, source: str) -> None:
        self._store, self._generator, self._source = store, generator, source
        self._queue = SampleQueue(store)  # who yields faster than the disk waits

    def run(self, stopped: threading.Event) -> None:
        """Keep what the user's code yields; it is never waited for, as it may never yield again."""
        thread = threading.Thread(target=self._ask, args=(stopped,), name="iterator", daemon=True)
        thread.start()
        self._queue.run(stopped)

    def _ask(self, stopped: threading.Event) -> None:
        pause_s = AGAIN_S
        while not stopped.is_set():
            try:
                for made in self._generator():
                    pause_s = AGAIN_S
                    self._take(made, stopped)
                    if stopped.is_set():
                        return
            except Exception as problem:  # noqa: BLE001 - a user's code may raise anything
                words = f"{self._source} failed: {as_line(problem)}; it is called again in {pause_s:.0f} s"
                self._store.refuse(BadSample("iterator", words))
                stopped.wait(pause_s)
                pause_s = min(2 * pause_s, LONGEST_S)
            else:
                log.info("%s has ended; its samples stay", self._source)
                return

    def _take(self, made: Any, stopped: threading.Event) -> None:
        try:
            sample = make_sample(*_parts(made))
        except BadSample as problem:
            self._store.refuse(problem)
            return
        while not stopped.is_set() and not self._queue.put(sample, wait_s=0.2):
            pass


def _parts(made: Any) -> tuple[Any, Any, Any]:
    """Input, label and name."""
    if isinstance(made, Mapping):
        if "x" not in made or set(made) - {"x", "y", "id"}:
            raise BadSample("not-numbers", "an iterator yielded a dict that is not of x, y and id")
        return made["x"], made.get("y"), made.get("id")
    if isinstance(made, tuple):
        if not 1 <= len(made) <= 3:
            raise BadSample("not-numbers", f"an iterator yielded a tuple of {len(made)}; not (x, y[, id])")
        x, y, name = (*made, None, None)[:3]
        return x, y, name
    return made, None, None
