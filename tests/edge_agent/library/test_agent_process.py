"""The child process of an Agent, played by scripts: how it is started, watched, begun again and ended."""

import logging
import sys
import time

import pytest

from fleetune.edge_agent.library import agent_process
from fleetune.edge_agent.library.agent_process import AgentProcess
from fleetune.edge_agent.library.messages import Ended, LogLine
from fleetune.protocols.errors import FleetuneError, ModelError, SettingError

HEAD = """
import json, os, sys, time
start = json.loads(sys.stdin.buffer.readline())
def say(**word):
    os.write(start["output"], json.dumps(word).encode() + b"\\n")
"""
READY = 'say(type="ready")\n'


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """A process whose child runs a script; what it said so far stands in `heard`."""
    made = []
    monkeypatch.setattr(agent_process, "FIRST_PAUSE_S", 0.01)

    def begin(script, **options):
        path = tmp_path / "child.py"
        path.write_text(HEAD + script)
        monkeypatch.setattr(agent_process, "_COMMAND", ("-S", str(path)))
        lock, heard = (tmp_path / "lock").open("ab"), []
        process = AgentProcess(options, lock, heard.append)
        process.heard = heard
        made.append((process, lock))
        process.start()
        return process

    yield begin
    for process, lock in made:
        process.close(0.0)
        lock.close()


def until(condition):
    give_up_at = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def test_it_is_told_its_options_and_nobody_else_is(begin):
    words = (
        'say(type="said", level=20, logger="x", line=start["options"]["broker"] + " " + " ".join(sys.argv))\n'
    )
    process = begin(READY + words + "sys.stdin.buffer.readline()", broker="mqtt://join:secret@b")
    until(lambda: len(process.heard) == 2)
    (said,) = [word for word in process.heard if isinstance(word, LogLine)]
    assert said.level == logging.INFO
    assert said.line.startswith("mqtt://join:secret@b ")
    assert said.line.count("secret") == 1


def test_it_finds_modules_as_its_parent_and_does_not_speak_for_its_service(begin, monkeypatch, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "sensor_of_mine.py").write_text("NAME = 'found'")
    monkeypatch.syspath_prepend(tmp_path / "mine")
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/a-service")
    script = 'import sensor_of_mine\nline = sensor_of_mine.NAME + str(os.environ.get("NOTIFY_SOCKET"))\n'
    process = begin(READY + script + 'say(type="said", level=20, logger="x", line=line)\ntime.sleep(600)')
    until(lambda: len(process.heard) == 2)
    assert process.heard[1].line == "foundNone"


@pytest.mark.parametrize(
    ("script", "kind", "words"),
    [
        ('say(type="failed", kind="ModelError", line="no trainer is installed")', ModelError, "^no trainer"),
        ('say(type="failed", kind="Nobody", line="it is so")', FleetuneError, "^it is so$"),
        ("sys.exit(3)", FleetuneError, r"ended \(exit code 3\)"),
        ("os.kill(os.getpid(), 9)", FleetuneError, r"ended \(signal SIGKILL\)"),
    ],
)
def test_one_that_does_not_begin_raises_its_line(begin, script, kind, words):
    with pytest.raises(kind, match=words):
        begin(script)


def test_no_interpreter_is_one_line_too(begin, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(
        SettingError, match=r"^cannot start the agent's process with /no/such/python: No such file"
    ):
        begin("")


def test_one_that_dies_is_begun_again(begin, tmp_path):
    mark = tmp_path / "times"
    script = READY + f'open({str(mark)!r}, "a").write("x")\nos.kill(os.getpid(), 9)'
    process = begin(script)
    until(lambda: mark.exists() and len(mark.read_text()) >= 3)
    assert any("signal SIGKILL" in word.line for word in process.heard if isinstance(word, Ended))


def test_at_close_it_is_asked_to_stop_and_not_begun_again(begin, tmp_path):
    mark = tmp_path / "said"
    script = READY + f'open({str(mark)!r}, "ab").write(sys.stdin.buffer.readline())'
    process = begin(script)
    process.close(60)
    assert mark.read_bytes() == b"stop\n"
    assert process.pid is None
    assert not [word for word in process.heard if isinstance(word, Ended)]


def test_one_that_does_not_stop_is_killed(begin):
    process = begin(READY + "time.sleep(600)")
    assert process.pid is not None
    process.close(0.05)
    until(lambda: process.pid is None)


def test_whatever_it_says_that_is_no_word_is_passed_over(begin):
    process = begin(
        READY
        + 'os.write(start["output"], b"{nonsense\\n")\n'
        + 'say(type="said", level=30, logger="x", line="l")\ntime.sleep(600)'
    )
    until(lambda: len(process.heard) == 2)
