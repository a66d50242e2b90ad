"""Worker processes: what they answer, and that nothing of them is seen or left when they are stopped."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from fleetune.protocols.errors import FleetuneError
from fleetune.tools.simulator.workers import shared_memory_channel
from fleetune.tools.simulator.workers.worker_processes import WorkerProcesses, tell

DEADLINE_S = 120


def answers(number):
    tell(("begun", number))
    return number, os.getpid()


def fails():
    raise ZeroDivisionError("a fault of ours")


def large():
    return bytes(2**26)


def back(what):
    return what


def test_what_is_told_comes_as_it_was_however_large(monkeypatch):
    """Small, in memory that is there, that grows, by the pipe, and small again; arrays may be written to."""
    monkeypatch.setattr(shared_memory_channel, "_MOST_BYTES", 2**24)  # this side's
    with WorkerProcesses(1) as pool:
        for size in (10, 2**15, 2**20, 2**16, 2**22, 3):
            sent = {"array": np.arange(size, dtype=np.float32), "bytes": bytes(range(256)) * (size // 64)}
            came = pool.submit(back, sent).result()
            assert came["bytes"] == sent["bytes"]
            assert np.array_equal(came["array"], sent["array"])
            came["array"] += 1
            later = pool.submit(back, size).result()
            assert later == size
            assert np.array_equal(came["array"], sent["array"] + 1), "nothing of it is left in the memory"


def test_large_news_come_before_a_large_answer_overwrites_nothing_of_them():
    with WorkerProcesses(1) as pool:
        assert pool.submit(tells_much).result() == b"b" * 2**19
        assert pool.news.get_nowait() == b"a" * 2**19


def tells_much():
    tell(b"a" * 2**19)
    return b"b" * 2**19


def test_where_memory_cannot_be_shared_the_pipe_takes_all(monkeypatch):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    with WorkerProcesses(1) as pool:
        assert pool.submit(back, b"c" * 2**20).result() == b"c" * 2**20


def test_no_descriptor_is_left_of_workers_that_died():
    def descriptors():
        return psutil.Process().num_fds()

    with WorkerProcesses(1) as pool:
        pool.submit(back, b"c" * 2**19).result()
        before = descriptors()
        for _ in range(3):
            with pytest.raises(FleetuneError):
                pool.submit(os._exit, 1).result()
            pool.submit(back, b"c" * 2**19).result()
        assert descriptors() <= before + 2 * 3, "but for the two by which multiprocessing knows a process"


def test_jobs_are_answered_faults_are_raised_and_news_come_first():
    with WorkerProcesses(1) as pool:
        jobs = [pool.submit(answers, number) for number in range(3)]
        assert [job.result()[0] for job in jobs] == [0, 1, 2]
        assert [pool.news.get_nowait() for _ in jobs] == [("begun", 0), ("begun", 1), ("begun", 2)]
        with pytest.raises(ZeroDivisionError, match="a fault of ours") as fault:
            pool.submit(fails).result()
        assert "in fails" in str(fault.value.__cause__), "the worker's traceback"
        (worker,) = {job.result()[1] for job in jobs}
    assert not psutil.pid_exists(worker)


def test_a_dead_worker_is_one_line_and_another_takes_its_place():
    with WorkerProcesses(1) as pool:
        first = pool.submit(os.getpid).result()
        with pytest.raises(FleetuneError, match=r"a worker process died.*try fewer --workers"):
            pool.submit(os._exit, 1).result()
        assert pool.submit(os.getpid).result() != first


def test_what_start_raises_every_job_raises():
    with WorkerProcesses(1, fails) as pool:
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                pool.submit(os.getpid).result()


def test_left_by_an_exception_it_waits_for_nobody_not_even_for_half_an_answer():
    jobs = []

    def interrupted():
        with WorkerProcesses(2) as pool:
            jobs.append(pool.submit(os.getpid))
            jobs[0].result()
            jobs.extend(pool.submit(large) for _ in range(4))
            jobs.append(pool.submit(time.sleep, 6_000))  # the test's own time limit is less
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert jobs[-1].cancelled() or jobs[-1].exception()
    assert all(job.done() for job in jobs)
    assert not psutil.pid_exists(jobs[0].result())


def begun(tmp_path, importing=""):
    """A program whose two workers are busy for ever, and tell so by files; it leads a process group."""
    (tmp_path / "program.py").write_text(
        textwrap.dedent(f"""
            import os, pathlib, signal, time
            if __name__ == "__mp_main__":
                {importing or "pass"}
            from fleetune.tools.simulator.workers.worker_processes import WorkerProcesses

            def busy(number):
                pathlib.Path(f"{{number}}-{{os.getpid()}}.busy").touch()
                time.sleep(600)

            if __name__ == "__main__":
                signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the tests' parent ignores
                try:
                    with WorkerProcesses(2, with_script=True) as pool:
                        jobs = [pool.submit(busy, number) for number in range(4)]
                        jobs[0].result()
                except KeyboardInterrupt:
                    print("stopped")
        """)
    )
    return subprocess.Popen(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def files(folder: Path, pattern: str, number: int) -> list[Path]:
    """Once so many are there."""
    give_up = time.monotonic() + DEADLINE_S
    while len(found := sorted(folder.glob(pattern))) < number:
        assert time.monotonic() < give_up, pattern
        time.sleep(0.02)
    return found


def gone(pids) -> bool:
    """Once they are."""
    give_up = time.monotonic() + DEADLINE_S
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < give_up, pids
        time.sleep(0.02)
    return True


@pytest.mark.parametrize(
    ("importing", "seen"),
    [("", "*.busy"), ("pathlib.Path(f'{os.getpid()}.importing').touch(); time.sleep(600)", "*.importing")],
    ids=["working", "importing"],
)
def test_ctrl_c_reaches_the_program_alone(tmp_path, importing, seen):
    program = begun(tmp_path, importing)
    pids = [int(path.stem.split("-")[-1]) for path in files(tmp_path, seen, 2)]
    os.killpg(program.pid, signal.SIGINT)  # as a terminal does
    assert program.communicate(timeout=DEADLINE_S) == ("stopped\n", "")
    assert program.returncode == 0
    assert gone(pids)


def test_workers_end_with_a_program_that_was_killed(tmp_path):
    program = begun(tmp_path)
    pids = [int(path.stem.split("-")[-1]) for path in files(tmp_path, "*.busy", 2)]
    program.kill()
    assert program.communicate(timeout=DEADLINE_S) == ("", "")
    assert gone(pids)
