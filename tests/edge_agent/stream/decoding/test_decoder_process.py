"""The process that decodes files: it reads many, hostile ones do no harm, and it is replaced and ends."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from tests.helpers import hostile_files
from tests.helpers.fleet_processes import wait_until

from fleetune.edge_agent.stream.decoding import decoder_process
from fleetune.edge_agent.stream.decoding.decoder_process import DecoderProcess
from fleetune.edge_agent.stream.intakes import watched_folder
from fleetune.edge_agent.stream.intakes.watched_folder import SETTLED_S, WatchedFolder
from fleetune.edge_agent.stream.sample_store import SampleStore
from fleetune.protocols.errors import DataError, ReadingStopped
from fleetune.protocols.input_files import input_limits

MOST_MORE_BYTES = 200_000_000  # of agent and process together, for one hostile file


@pytest.fixture
def child():
    found = DecoderProcess()
    yield found
    found.close()


@pytest.fixture
def shard(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.eye(4, dtype=np.float32), y=[0, 1, 2, 3], id=list("abcd"))
    return tmp_path / "a.npz"


def rows(child, path):
    return [x.tolist() for frame in child.decode(path, "npz") for x in frame.x.array]


def pid(child):
    return child._process.pid


def test_shards_come_back_as_they_were_written(tmp_path, child):
    rng = np.random.default_rng(0)
    columns = {
        "x": [rng.normal(size=(900, 3, 5)), rng.integers(0, 256, (70, 9), np.uint8), np.eye(5, order="F")],
        "y": [rng.normal(size=(900, 2)).astype("f4"), np.arange(70, dtype="u2"), np.array([1.5, 2, 0, 0, 1])],
        "id": [np.arange(900), None, np.array(["a", "ä", "cc", "d", "e"])],
    }  # fmt: skip
    for number, (x, y, names) in enumerate(zip(*columns.values(), strict=True)):
        save = (np.savez, np.savez_compressed)[number % 2]
        save(tmp_path / "a.npz", x=x, y=y, other=[1], **({} if names is None else {"id": names}))
        blocks = [*child.decode(tmp_path / "a.npz", "npz")]
        found = np.concatenate([one.x.array for one in blocks])
        np.testing.assert_array_equal(found, x if x.dtype == np.uint8 else x.astype(np.float32))
        np.testing.assert_array_equal(np.concatenate([one.y.array for one in blocks]), y)
        if names is not None:
            assert [name for one in blocks for name in one.names] == names.tolist()
    assert child.num_started == 1


class Memory:
    """The most memory that this process and its children take beyond what they took at first."""

    def __init__(self):
        self._me, self._ended = psutil.Process(), threading.Event()
        self._before, self.most = self._me.memory_info().rss, 0
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()

    def _look(self):
        while not self._ended.wait(0.005):
            found = self._me.memory_info().rss - self._before
            for one in self._me.children():
                try:  # until it runs its program, a new process seems to hold all that is ours
                    found += one.memory_info().rss if "child" in "".join(one.cmdline()) else 0
                except psutil.Error:
                    continue
            self.most = max(self.most, found)


HOSTILE = {
    "a pipe": ("a.png", hostile_files.write_fifo, "is a named pipe (FIFO); expected a regular file"),
    "a link without end": ("a.npz", hostile_files.write_endless_link, "is a device; expected a regular file"),
    "512 MB in 2 MB": ("a.npz", hostile_files.write_npz_bomb, "536.9 MB unpacked; at most 268.4 MB"),
    "8 TB announced": ("a.npz", hostile_files.write_lying_npz, "8,796.1 GB unpacked"),
    "a header of 64 MB in 64 kB": (
        "a.npz",
        hostile_files.write_long_header_npz,
        "its header has 67,108,864 bytes; at most 10,000 are read",
    ),
    "PostScript": ("a.png", hostile_files.write_eps, "not a readable image"),
    "4 billion pixels": ("a.png", hostile_files.write_huge_image, "an image of 65000 x 65000"),
    "classes without end": ("classes.txt", hostile_files.write_huge_classes, "at most 1.0 MB are read"),
    "a line of a million cells": ("a.csv", hostile_files.write_wide_table, "more than 262,144 cells"),
    "a table of one line": ("a.csv", hostile_files.write_huge_classes, "its first line"),
}


@pytest.mark.parametrize(("name", "write", "words"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_costs_a_line_and_little_memory(tmp_path, name, write, words, caplog):
    if name.endswith(".png"):
        pytest.importorskip("PIL", reason="Pillow is not installed")
    now = [0.0]
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / name)
    np.savez(tmp_path / "in" / "z.npz", x=np.eye(2))
    store = SampleStore.open(tmp_path / "s.sqlite")
    folder = WatchedFolder(store, tmp_path / "in", clock=lambda: now[0])
    with Memory() as memory:
        for _ in range(4):
            folder.scan()
            now[0] += SETTLED_S
    folder.close()
    store.save_counts()
    assert store._connection.execute("SELECT kind, count FROM refusal").fetchall() == [("file", 1)]
    assert words in caplog.text
    assert store._connection.execute("SELECT count(*) FROM sample").fetchone() == (2,)  # the next file's
    store.close()
    assert memory.most < MOST_MORE_BYTES


def test_of_a_sparse_sound_only_what_counts_is_read(tmp_path):
    now = [0.0]
    (tmp_path / "in").mkdir()
    hostile_files.write_sparse_wav(tmp_path / "in" / "a.wav")
    store = SampleStore.open(tmp_path / "s.sqlite")
    folder = WatchedFolder(store, tmp_path / "in", clock=lambda: now[0])
    with Memory() as memory:
        for _ in range(2):
            folder.scan()
            now[0] += SETTLED_S
    assert store._connection.execute("SELECT count(*) FROM sample").fetchone() == (1,)
    store.close()
    assert memory.most < MOST_MORE_BYTES


def test_no_program_is_started_for_an_image(tmp_path, child, monkeypatch):
    """Pillow calls Ghostscript, `gs`, for PostScript, whatever the file is called."""
    pytest.importorskip("PIL", reason="Pillow is not installed")
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    hostile_files.write_eps(tmp_path / "a.png")
    with pytest.raises(DataError, match="not a readable image"):
        [*child.decode(tmp_path / "a.png", "image")]
    assert not (tmp_path / "started").exists()


def test_one_process_reads_many_files_and_is_replaced_in_time(shard, tmp_path, monkeypatch):
    now = [0.0]
    child = DecoderProcess(clock=lambda: now[0])
    monkeypatch.setattr(decoder_process, "MAX_FILES", 5)
    (tmp_path / "bad.npz").write_bytes(b"none")
    for _ in range(4):
        assert len(rows(child, shard)) == 4
    with pytest.raises(DataError, match=r"bad\.npz is not a readable \.npz file"):
        rows(child, tmp_path / "bad.npz")
    assert child.num_started == 1  # a bad file alone replaces nothing
    rows(child, shard)
    assert child.num_started == 2
    was = pid(child)
    child.rest()
    assert pid(child) == was
    now[0] += decoder_process.IDLE_S + 1
    child.rest()
    assert not psutil.pid_exists(was)
    rows(child, shard)
    assert child.num_started == 3
    os.kill(pid(child), signal.SIGKILL)
    child._process.wait()
    assert len(rows(child, shard)) == 4
    assert child.num_started == 4
    child.close()


def test_a_file_that_takes_too_long_or_ends_the_process_is_left_out(shard, child, monkeypatch):
    rows(child, shard)
    monkeypatch.setattr(decoder_process, "SILENT_S", 0.2)
    os.kill(pid(child), signal.SIGSTOP)
    with pytest.raises(DataError, match=r"a\.npz: reading it takes longer than 0\.2 s"):
        rows(child, shard)
    monkeypatch.undo()
    assert len(rows(child, shard)) == 4
    for program in ("pass", "import sys; sys.stdout.buffer.write(b'\\xff' * 100)",
                    "import sys; sys.stdout.buffer.write(b'\\0\\0\\0\\1x')"):  # fmt: skip
        child.close()
        monkeypatch.setattr(decoder_process, "_COMMAND", ("-c", program))
        with pytest.raises(DataError, match="the process that read it ended"):
            rows(child, shard)
        monkeypatch.undo()
        assert len(rows(child, shard)) == 4


def test_a_file_that_takes_too_much_memory_is_left_out(shard, child, monkeypatch):
    hungry = "import time; taken = b'x' * 500_000_000; time.sleep(600)"
    monkeypatch.setattr(decoder_process, "_COMMAND", ("-c", hungry))
    with pytest.raises(DataError, match=r"reading it takes \d+ MiB of memory; at most 416 MiB: split it"):
        rows(child, shard)
    assert child._process is None
    monkeypatch.undo()
    assert len(rows(child, shard)) == 4


def test_a_decoder_that_never_ends_is_ended_by_the_system():
    """It may keep the thread from running that would see that the agent has ended."""
    module = "from fleetune.edge_agent.stream.decoding.child_main import limit_processor_time"
    program = f"{module}; limit_processor_time(1); [0 for _ in iter(int, 1)]"
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == -signal.SIGXCPU


def test_a_board_of_little_memory_has_a_small_budget(tmp_path):
    child = DecoderProcess(memory_bytes=40_000_000)
    np.savez(tmp_path / "a.npz", x=np.zeros((4000, 800), np.float32))
    with pytest.raises(DataError, match=r"12\.8 MB; at most 10\.0 MB are read"):
        rows(child, tmp_path / "a.npz")
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((4000, 800), np.float32))
    with pytest.raises(DataError, match=r"12\.8 MB unpacked; at most 10\.0 MB are read"):
        rows(child, tmp_path / "a.npz")
    child.close()


@contextmanager
def in_a_thread(target):
    problems = []

    def run():
        try:
            target()
        except ReadingStopped as problem:
            problems.append(problem)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield problems
    thread.join(60)
    assert not thread.is_alive()


def test_a_stop_while_a_file_is_read_ends_it(shard, child):
    rows(child, shard)
    os.kill(pid(child), signal.SIGSTOP)  # it never answers
    stopped = threading.Event()

    def read():
        with input_limits(is_stopped=stopped.is_set):
            rows(child, shard)

    with in_a_thread(read) as problems:
        stopped.set()
    assert len(problems) == 1
    assert child._process is None


def test_a_folder_that_is_stopped_while_it_reads_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(watched_folder, "POLL_S", 0.01)
    monkeypatch.setattr(watched_folder, "SETTLED_S", 0.0)
    (tmp_path / "in").mkdir()
    with (tmp_path / "in" / "a.csv").open("w") as file:
        file.write("x\n")
        file.writelines(f"{number % 7}\n" for number in range(400_000))
    store, stopped, asked = SampleStore.open(tmp_path / "s.sqlite"), threading.Event(), []
    refuse = store.add

    def add(samples, *rest):
        asked.append(len(samples))
        return refuse(samples, *rest)

    store.add = add
    folder = WatchedFolder(store, tmp_path / "in")
    with in_a_thread(lambda: folder.run(stopped)) as problems:
        wait_until(lambda: len(asked) > 3, "it reads")
        stopped.set()
    assert problems == []
    assert sum(asked) < 400_000
    assert store.file_progress(str(tmp_path / "in" / "a.csv")) is None  # it is read anew
    del store.add
    store.close()


PARENT = """
import sys, time
from pathlib import Path
from fleetune.edge_agent.stream.decoding.decoder_process import DecoderProcess
child = DecoderProcess()
[*child.decode(Path(sys.argv[1]), "npz")]
print(child._process.pid, flush=True)
time.sleep(600)
"""


def test_it_ends_with_an_agent_that_is_killed(shard):
    with subprocess.Popen([sys.executable, "-c", PARENT, str(shard)], stdout=subprocess.PIPE) as parent:
        its = psutil.Process(int(parent.stdout.readline()))
        assert its.is_running()
        parent.kill()
    wait_until(lambda: not its.is_running() or its.status() == psutil.STATUS_ZOMBIE, "it ends")


def test_an_agent_that_watches_no_folder_loads_nothing_of_it():
    asked = "import sys, fleetune.edge_agent.starting, fleetune.edge_agent.stream.sample_stream"
    checked = "assert not [m for m in sys.modules if 'decoding' in m or m.startswith('PIL')]"
    subprocess.run([sys.executable, "-c", f"{asked}; {checked}"], check=True, cwd=Path(__file__).parents[4])
