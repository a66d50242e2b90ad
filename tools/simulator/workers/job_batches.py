"""Batches of training jobs, so that one worker trains several devices at once."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from fleetune.tools.simulator.jobs import TrainingJob, TrainingResult
from fleetune.tools.simulator.workers import worker


class _BatchedFuture(Future[TrainingResult]):
    """The future of a job in a batch. The batch is submitted, even if incomplete, when its result is
    needed.
    """

    def __init__(self, submit: Callable[["_BatchedFuture"], None]) -> None:
        super().__init__()
        self._submit = submit

    def result(self, timeout: float | None = None) -> TrainingResult:
        self._submit(self)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._submit(self)
        return super().exception(timeout)


class BatchingExecutor(Executor):
    """Submits training jobs in batches, in the order in which they came.

    A batch depends only on that order, and on when a result is needed. So a repeated run has the same batches
    and bits.

    Args:
        executor: an executor whose workers have `most` slots.
        most: devices in a batch.
    """

    def __init__(self, executor: Executor, most: int) -> None:
        self._executor, self._most = executor, most
        self._group: list[tuple[_BatchedFuture, TrainingJob]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Add a call of `worker.train` to the batch; submit any other call at once."""
        if fn is not worker.train:
            return self._executor.submit(fn, *args, **kwargs)
        one = _BatchedFuture(self._submit_group)
        self._group.append((one, *args))
        if len(self._group) == self._most:
            self._submit_group(one)
        return one

    def _submit_group(self, wanted: _BatchedFuture) -> None:
        if not any(one is wanted for one, _ in self._group):
            return
        group, self._group = self._group, []
        replies = self._executor.submit(worker.train_batch, [job for _, job in group])
        replies.add_done_callback(lambda done: _set_results([one for one, _ in group], done))


def _set_results(group: list[_BatchedFuture], done: Future[list[TrainingResult | Exception]]) -> None:
    fault = done.exception()
    for number, one in enumerate(group):
        found = fault or done.result()[number]
        if isinstance(found, BaseException):
            one.set_exception(found)
        else:
            one.set_result(found)
