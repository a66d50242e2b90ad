"""Intake of samples from a generator function of the user.

The function yields x, (x, y), (x, y, id), or a dict of these, and runs in a thread of its own. After an error
it is called again, at growing intervals. It may start from its first sample again, because no sample is
stored twice.
"""

import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from fleetune.edge_agent.datasets.sources import arguments
from fleetune.edge_agent.stream.intakes.write_queue import SampleQueue
from fleetune.edge_agent.stream.sample import BadSample, make_sample
from fleetune.edge_agent.stream.sample_store import SampleStore
from fleetune.protocols.errors import DataError
from fleetune.protocols.one_line import without_url
from fleetune.protocols.user_code import as_line, user_module

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 600.0

log = logging.getLogger(__name__)

Generator = Callable[[], Iterator[Any]]


def find_generator(source: str) -> Generator | None:
    """Find the generator function that `package.module:function` names; None if it names something else.

    Options after a question mark are its arguments, as for `datasets.sources.load`.

    Raises:
        DataError: the module cannot be imported, or the function does not take these arguments.
    """
    module, _, rest = source.partition(":")
    name, _, options = rest.partition("?")
    try:
        found = getattr(user_module(module), name, None)
    except Exception as problem:  # a user's file may raise anything
        raise DataError(f"data.source `{without_url(source)}`: {as_line(problem)}") from problem
    if not inspect.isgeneratorfunction(found):
        return None
    given = arguments(without_url(source), options)
    try:
        inspect.signature(found).bind(**given)
    except TypeError as problem:
        takes = ", ".join(inspect.signature(found).parameters) or "no arguments"
        raise DataError(f"data.source `{without_url(source)}`: {problem}; {name} takes {takes}") from None
    return partial(found, **given)


class GeneratorIntake:
    """Stores the samples that a generator function yields.

    Args:
        store: the device's store.
        generator: the user's function.
        source: the source as its owner wrote it, for messages.
    """

    def __init__(self, store: SampleStore, generator: Generator, source: str) -> None:
        self._store, self._generator, self._source = store, generator, source
        self._queue = SampleQueue(store)  # when it is full, the generator waits for the disk

    def run(self, stopped: threading.Event) -> None:
        """Store samples until `stopped` is set, without waiting for the generator, which may never yield
        again.
        """
        thread = threading.Thread(target=self._consume, args=(stopped,), name="iterator", daemon=True)
        thread.start()
        self._queue.run(stopped)

    def _consume(self, stopped: threading.Event) -> None:
        pause_s = FIRST_PAUSE_S
        while not stopped.is_set():
            try:
                for yielded in self._generator():
                    pause_s = FIRST_PAUSE_S
                    self._take(yielded, stopped)
                    if stopped.is_set():
                        return
            except Exception as problem:  # noqa: BLE001 - a user's code may raise anything
                words = f"{self._source} failed: {as_line(problem)}; it is called again in {pause_s:.0f} s"
                self._store.refuse(BadSample("iterator", words))
                stopped.wait(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                log.info("%s has ended; its samples stay in the store", self._source)
                return

    def _take(self, yielded: Any, stopped: threading.Event) -> None:
        try:
            sample = make_sample(*_parts(yielded))
        except BadSample as problem:
            self._store.refuse(problem)
            return
        self._queue.put_until(sample, stopped)


def _parts(yielded: Any) -> tuple[Any, Any, Any]:
    """Return input, label and name of a value that the generator yielded."""
    if isinstance(yielded, Mapping):
        if "x" not in yielded or set(yielded) - {"x", "y", "id"}:
            raise BadSample("not-numbers", "the generator yielded a dict with other keys than x, y and id")
        return yielded["x"], yielded.get("y"), yielded.get("id")
    if isinstance(yielded, tuple):
        if not 1 <= len(yielded) <= 3:
            raise BadSample(
                "not-numbers",
                f"the generator yielded a tuple of {len(yielded)}; expected (x, y) or (x, y, id)",
            )
        x, y, name = (*yielded, None, None)[:3]
        return x, y, name
    return yielded, None, None
