"""Simulated devices' files, kept as they were when a round ended."""

import errno
import os

import pytest

from fleetune.protocols.files import write_atomically
from fleetune.tools.simulator.workers import device_files
from fleetune.tools.simulator.workers.device_files import forget_before, keep_before, restore


class Killed(BaseException):
    pass


def write(devices, name, text):
    write_atomically(devices / name, text.encode(), durable=False)


def contents(devices):
    files = (path for path in devices.rglob("*") if path.is_file() and "before" not in path.parts)
    return {str(path.relative_to(devices)): path.read_text() for path in files}


def a_round(devices, closed, text):
    """Two devices work, one of them for the first time; one does so twice."""
    for turn in ("first", "again"):
        keep_before(devices, "d1", closed)
        write(devices, "d1.state", f"{text} {turn}")
        write(devices, "d1.versions/1", f"{text} {turn}")
    keep_before(devices, "d2", closed)
    write(devices, "d2.state", text)


def test_what_a_round_has_changed_is_put_back_however_often(tmp_path):
    write(tmp_path, "d1.state", "old")
    write(tmp_path, "d1.deployed", "old served")
    write(tmp_path, "d1.versions/0", "a version")
    before = contents(tmp_path)
    a_round(tmp_path, 4, "new")
    assert contents(tmp_path) != before
    for _ in range(2):
        restore(tmp_path, 4)
        assert contents(tmp_path) == before
    a_round(tmp_path, 4, "newer")
    restore(tmp_path, 4)
    assert contents(tmp_path) == before


def test_samples_that_change_in_place_are_put_back_without_what_a_killed_writer_left(tmp_path):
    write(tmp_path, "d1.samples.sqlite", "old")
    before = contents(tmp_path)
    for _ in range(2):
        keep_before(tmp_path, "d1", 4)
        (tmp_path / "d1.samples.sqlite").write_text("new")  # no file of its own
        write(tmp_path, "d1.samples.sqlite-wal", "of a transaction that was under way")
        restore(tmp_path, 4)
        assert contents(tmp_path) == before


def test_a_round_that_has_ended_stays(tmp_path):
    a_round(tmp_path, 0, "one")
    forget_before(tmp_path, 0)
    after = contents(tmp_path)
    restore(tmp_path, 1)
    assert contents(tmp_path) == after
    a_round(tmp_path, 1, "two")
    restore(tmp_path, 1)
    assert contents(tmp_path) == after
    assert [path.name for path in (tmp_path / "before").iterdir()] == ["1"]


@pytest.mark.parametrize("links", range(4))
def test_killed_while_it_keeps_files_they_are_those_that_are_put_back(tmp_path, monkeypatch, links):
    write(tmp_path, "d1.state", "old")
    write(tmp_path, "d1.deployed", "old served")
    before, link = contents(tmp_path), os.link
    left = [links]

    def dying(*names):
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        link(*names)

    monkeypatch.setattr(device_files.os, "link", dying)
    if links < 3:  # state, served and the mark
        with pytest.raises(Killed):
            keep_before(tmp_path, "d1", 7)
    left[0] = 10**9
    restore(tmp_path, 7)
    assert contents(tmp_path) == before
    a_round(tmp_path, 7, "new")
    restore(tmp_path, 7)
    assert contents(tmp_path) == before


def test_on_a_file_system_without_links_files_are_copied(tmp_path, monkeypatch):
    def none(source, to):
        if not source.exists():
            raise FileNotFoundError(errno.ENOENT, "none", str(source))
        raise OSError(errno.EPERM, "no links here", str(to))

    monkeypatch.setattr(device_files.os, "link", none)
    write(tmp_path, "d1.state", "old")
    before = contents(tmp_path)
    a_round(tmp_path, 4, "new")
    restore(tmp_path, 4)
    assert contents(tmp_path) == before
