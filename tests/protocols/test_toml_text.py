"""TOML of users: what is nested without end, too large or no TOML is one line, and takes no time."""

import os
import time

import pytest
from tests.helpers.errors import raises

from fleetune.protocols.errors import SettingError
from fleetune.protocols.settings.run_toml import read_run, settings_of
from fleetune.protocols.toml_text import MAX_DEPTH, parse_toml, parse_value, read_toml

HOSTILE = {
    "nested brackets": ("x = " + "[" * 200_000, "nested deeper than 32"),
    "nested tables": ("x = " + "{a = " * 200_000, "nested deeper than 32"),
    "a key of many parts": (".".join(["a"] * 200_000) + " = 1", "nested deeper than 32"),
    "a quoted key of many parts": (" . ".join(['"a"', "'b'"] * 60_000) + " = 1", "nested deeper than 32"),
    "nested by headings": ("[" + ".".join("a" * 33) + "]", "nested deeper than 32"),
    "many digits": ("[run]\nseed = " + "9" * 10_000, "an integer of too many digits"),
    "an integer beyond 64 bits": ("[run]\nseed = [1, 9223372036854775808]", "run.seed: an integer beyond 64"),
    "many hexadecimal digits": ("x = 0x" + "f" * 900_000, "x: an integer beyond 64 bits"),
    "no TOML": ("x = ", "Invalid value"),
    "a long word": ("a" * 10**6, "Expected '='"),
    "many words": ("a " * 500_000, "Expected '='"),
    "many quotes": ('"' * 10**6, "Expected '='"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "words"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_files_are_one_line_at_once(tmp_path, text, words):
    path = tmp_path / "run.toml"
    path.write_text(text)
    began = time.thread_time()
    with pytest.raises(SettingError) as refused:
        read_run(path)
    assert time.thread_time() - began < 10  # tomllib takes hours for some of them
    line = str(refused.value)
    assert line.startswith(f"{path}: ")
    assert words in line
    assert "\n" not in line
    assert len(line) < 1000


def test_what_is_no_file_of_settings_is_one_line(tmp_path):
    path = tmp_path / "x.toml"
    os.mkfifo(path)
    with raises(SettingError, "x.toml", "FIFO"):
        read_toml(path)
    path.unlink()
    path.write_bytes(b"a = 1\n" + b"#" * 2**20)
    with raises(SettingError, "1.0 MB"):
        read_toml(path)
    path.write_bytes(b"\xef\xbb\xbfa = 1")  # a byte-order mark
    assert read_toml(path) == {"a": 1}


def test_keys_and_values_that_are_not_known_are_shown_in_part(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text("a" * 900_000 + " = 1")
    with pytest.raises(SettingError, match="unknown key") as refused:
        read_run(path)
    assert len(str(refused.value)) < 1000


def test_honest_depth_is_read():
    deep = "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1)
    assert str(parse_toml(f"x = {deep}")["x"]) == deep
    dots = "x = 'a.b.c'  # " + "." * 100 + "\ny = 1.5\n" + ".".join("a" * 31) + " = 1"
    assert parse_toml(dots)["y"] == 1.5


def test_values_of_options_are_bounded_too():
    assert parse_value("3") == 3
    assert parse_value(" three ") == "three"
    assert parse_value("9" * 10_000) == "9" * 10_000
    with raises(SettingError, "32"):
        parse_value("[" * 50_000)
    with raises(SettingError, "64 bits"):
        settings_of({}, ["run.seed=" + "9" * 100])
