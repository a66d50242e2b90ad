"""Files that a user or another program supplies: what is no regular file or too large is one line."""

import gzip
import io
import os
import socket
import tracemalloc
import zipfile

import numpy as np
import pytest
from tests.helpers.errors import raises

from fleetune.protocols import input_files
from fleetune.protocols.errors import DataError, ReadingStopped, SettingError
from fleetune.protocols.input_files import (
    input_limits,
    memory_limit_bytes,
    open_input,
    open_text_input,
    read_input,
    read_text_input,
)


def test_a_regular_file_is_read_also_behind_links(tmp_path):
    (tmp_path / "a").write_bytes(b"0123456789")
    (tmp_path / "b").symlink_to("a")
    assert read_input(tmp_path / "b", 10) == b"0123456789"
    with open_input(tmp_path / "a", 10) as file:
        assert file.read(3) == b"012"
        assert file.seek(-2, os.SEEK_END) == 8
        assert file.read() == b"89"
        assert file.tell() == 10
        with pytest.raises(io.UnsupportedOperation):
            file.fileno()


def fifo(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/zero")


def listener(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def loop(path):
    path.symlink_to(path)


def sparse(path):
    with path.open("wb") as file:
        file.truncate(10**12)


REFUSED = {
    "a folder": lambda path: path.mkdir(),
    "a named pipe (FIFO)": fifo,
    "a device": device,
    "a socket": listener,
    "no such file": lambda _: None,
    "oo many": loop,
    "1,000.0 GB; at most 1.0 MB": sparse,
}


@pytest.mark.parametrize(("words", "make"), REFUSED.items(), ids=REFUSED)
def test_what_is_no_bounded_regular_file_is_one_line(tmp_path, monkeypatch, words, make):
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    path = tmp_path.relative_to(tmp_path) / "x"
    make(path)
    with pytest.raises(SettingError) as refused:
        read_input(path, 2**20, error=SettingError)
    assert words in str(refused.value)
    assert str(refused.value).startswith("x")
    assert "\n" not in str(refused.value)


def test_a_name_that_no_file_can_have_is_one_line(tmp_path):
    with pytest.raises(DataError, match="null"):
        read_input(tmp_path / "a\0b")


def test_a_file_that_becomes_a_pipe_after_the_first_look_is_refused(tmp_path, monkeypatch):
    path, stat = tmp_path / "x", os.stat
    path.write_bytes(b"honest")

    def swap(at):
        found = stat(at)
        path.unlink()
        os.mkfifo(path)
        return found

    monkeypatch.setattr(input_files.os, "stat", swap)
    with pytest.raises(DataError, match="named pipe"):
        read_input(path)


def test_a_file_that_grows_while_it_is_read_is_read_no_further(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"1" * 100)
    with open_input(path, 200_000) as file:
        with path.open("ab") as more:
            more.write(b"2" * 10**6)
        with raises(DataError, "200.0 kB"):
            file.read()


def test_packed_bytes_are_bounded_by_what_they_unpack_to(tmp_path):
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(b"0" * 300_000))
    with open_input(path, 300_000, unpack=True) as file:
        assert len(file.read()) == 300_000
    with open_input(path, 300_000) as file:
        assert file.read() == path.read_bytes()
    bomb = tmp_path / "bomb.gz"
    bomb.write_bytes(gzip.compress(bytes(2**28)))
    tracemalloc.start()
    with open_input(bomb, 2**24, unpack=True) as file, pytest.raises(DataError, match="more than 16"):
        file.read()
    assert tracemalloc.get_traced_memory()[1] < 2**26
    tracemalloc.stop()
    for content in (b"no gzip", path.read_bytes()[:-9], b"", gzip.compress(b"abc")[:5]):
        path.write_bytes(content)
        with open_input(path, 2**20, unpack=True) as file:
            if content:
                with raises(DataError, "x.gz", remedy="copy"):
                    file.read()
            else:
                assert file.read() == b""


def test_reading_ends_when_it_is_asked_to(tmp_path):
    path = tmp_path / "x"
    with path.open("wb") as file:
        file.truncate(10**9)
    asked = []
    with (
        input_limits(is_stopped=lambda: len(asked) > 3 or bool(asked.append(1))),
        open_input(path) as file,
        pytest.raises(ReadingStopped),
    ):
        file.read()
    assert len(asked) == 4


def test_the_memory_of_the_board_is_the_limit_of_its_data(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"0" * 2000)
    assert memory_limit_bytes() > 10**8
    with input_limits(memory_bytes=1000):
        assert memory_limit_bytes() == 1000
        with input_limits(is_stopped=lambda: False), pytest.raises(DataError, match=r"2\.0 kB"):
            open_input(path)
    assert len(read_input(path)) == 2000


def test_libraries_read_through_it(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(5000))
    with open_input(tmp_path / "a.npz") as file, np.load(file) as arrays:
        assert arrays["x"].sum() == 12_497_500
    np.save(tmp_path / "a.npy", np.arange(5000))
    with open_input(tmp_path / "a.npy") as file:
        assert np.load(file).sum() == 12_497_500
    with open_input(tmp_path / "a.npz") as file, zipfile.ZipFile(file) as packed:
        assert packed.namelist() == ["x.npy"]


def test_text_is_utf_8_with_or_without_a_byte_order_mark(tmp_path):
    path = tmp_path / "x.csv"
    path.write_bytes(b"\xef\xbb\xbfa,\xc3\xa4\r\n")
    assert read_text_input(path) == "a,ä\r\n"
    with open_text_input(path) as file:
        assert list(file) == ["a,ä\r\n"]
    path.write_bytes(b"a\xff")
    with raises(SettingError, "UTF-8", "byte 1"):
        read_text_input(path, error=SettingError)
