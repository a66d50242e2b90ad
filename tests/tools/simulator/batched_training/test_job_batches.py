"""Jobs that go to workers together: which, when, and what comes back."""

from concurrent.futures import Executor, Future

import pytest

from fleetune.protocols.errors import FleetuneError
from fleetune.tools.simulator.workers import worker
from fleetune.tools.simulator.workers.job_batches import BatchingExecutor


class Workers(Executor):
    """Does nothing until `end` says what came of the oldest group."""

    def __init__(self):
        self.groups, self.others = [], []

    def submit(self, fn, *args):
        future = Future()
        if fn is worker.train_batch:
            self.groups.append((args[0], future))
        else:
            self.others.append((fn, args))
        return future


def gathered(jobs, most=3):
    workers = Workers()
    gathering = BatchingExecutor(workers, most)
    return workers, [gathering.submit(worker.train, job) for job in jobs]


def jobs_of(workers):
    return [jobs for jobs, _ in workers.groups]


def test_full_groups_go_off_in_the_order_of_their_jobs():
    workers, futures = gathered("abcdefg")
    assert jobs_of(workers) == [["a", "b", "c"], ["d", "e", "f"]]
    assert not any(one.done() for one in futures)


@pytest.mark.parametrize("asked", ["result", "exception"])
def test_who_is_waited_for_goes_off_with_those_before_it(asked):
    workers, futures = gathered("abcde")
    for number in (0, 3):  # of a group that has gone, and of one that has not
        with pytest.raises(TimeoutError):
            getattr(futures[number], asked)(timeout=0)
    assert jobs_of(workers) == [["a", "b", "c"], ["d", "e"]]


def test_each_has_what_came_of_its_own():
    workers, futures = gathered("abc")
    workers.groups[0][1].set_result(["A", ValueError("b"), "C"])
    assert (futures[0].result(), futures[2].result()) == ("A", "C")
    with pytest.raises(ValueError, match="b"):
        futures[1].result()


def test_a_worker_that_died_is_told_by_all_of_its_group():
    workers, futures = gathered("abcdef")
    workers.groups[0][1].set_exception(FleetuneError("it died"))
    assert [str(one.exception()) for one in futures[:3]] == 3 * ["it died"]
    assert not any(one.done() for one in futures[3:])


def test_anything_else_goes_at_once():
    workers = Workers()
    BatchingExecutor(workers, 3).submit(worker.receive_first_samples, 1, 2)
    assert workers.others == [(worker.receive_first_samples, (1, 2))]
