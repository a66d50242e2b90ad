"""A connection to a worker: what goes there comes out the same, and only who knows the key is heard."""

import socket
import threading
from contextlib import closing, contextmanager

import numpy as np
import pytest

from fleetune.tools.simulator.ray_engine import direct_channel
from fleetune.tools.simulator.ray_engine.direct_channel import ChannelError, ChannelListener, connect

HOST = "127.0.0.1"


@contextmanager
def accepting():
    """Where a line is awaited, and what came of that: a line, or why there is none."""
    awaited, came = ChannelListener(HOST), []

    def accept():
        try:
            came.append(awaited.accept())
        except ChannelError as problem:
            came.append(problem)

    thread = threading.Thread(target=accept)
    thread.start()
    yield awaited, came, thread
    thread.join()


@contextmanager
def line():
    """Both ends of one."""
    with accepting() as (awaited, came, thread):
        here = connect(awaited.address, awaited.key)
        thread.join()
        with closing(here), closing(came[0]):
            yield here, came[0]


@pytest.mark.parametrize(
    "message",
    [
        None,
        {"a": (1, "b"), "files": {}},
        {
            "files": {"x": np.arange(7, dtype=np.uint8), "empty": np.zeros(0, np.uint8)},
            "reply": bytes(300_000),
        },
        [np.arange(3_000_000, dtype=np.float32).reshape(3, -1), np.zeros((4, 4))[:, 1]],
    ],
    ids=["nothing", "no arrays", "files", "large, and not in one piece"],
)
def test_a_message_comes_out_the_same(message):
    with line() as (here, there):
        sending = threading.Thread(target=here.send, args=(message,))  # more than the system takes at once
        sending.start()
        assert there.poll(10)
        found = there.receive()
        sending.join()
    np.testing.assert_equal(found, message)


def test_messages_go_both_ways_and_what_came_may_be_written_to():
    with line() as (here, there):
        for number in range(3):
            here.send(np.full(5, number))
            came = there.receive()
            came += 1
            there.send(came)
            assert (here.receive() == number + 1).all()
        assert not here.poll(0.01)


def test_who_does_not_know_the_key_is_not_heard_and_keeps_nobody_out():
    with accepting() as (awaited, came, thread):
        for said in (b"", bytes(32), b"\x80\x05N."):
            with socket.create_connection(awaited.address) as stray:
                stray.sendall(said)
                stray.shutdown(socket.SHUT_WR)
                assert stray.recv(1) == b""
        here = connect(awaited.address, awaited.key)
        thread.join()
        with closing(here), closing(came[0]):
            here.send("a task")
            assert came[0].receive() == "a task"
            with pytest.raises(OSError, match="refused"):  # nobody else is let in
                socket.create_connection(awaited.address)


def test_nobody_is_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(direct_channel, "_TO_CONNECT_S", 0.05)
    with accepting() as (awaited, came, thread), socket.create_connection(awaited.address):  # says nothing
        thread.join()
    assert isinstance(came[0], ChannelError)


def test_nobody_there_is_a_line_error():
    awaited = ChannelListener(HOST)
    awaited._server.close()
    with pytest.raises(ChannelError, match="refused"):
        connect(awaited.address, awaited.key)


@pytest.mark.parametrize("waits", ["receive", "comes"])
def test_who_waits_hears_that_it_broke(waits):
    with line() as (here, there):
        breaking = threading.Timer(0.1, there.shut_down)
        breaking.start()
        with pytest.raises(ChannelError):
            here.receive() if waits == "receive" else here.poll(10)
        breaking.join()
        with pytest.raises(ChannelError):
            there.send(bytes(10_000_000))


def test_a_message_is_waited_for_as_long_as_it_takes(monkeypatch):
    monkeypatch.setattr(direct_channel, "_STALLED_S", 0.02)
    with line() as (here, there):
        sending = threading.Timer(0.2, here.send, args=("a task",))
        sending.start()
        assert there.receive() == "a task"
        sending.join()


def test_a_message_that_stops_in_its_midst_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(direct_channel, "_STALLED_S", 0.1)
    with line() as (here, there):
        here._connection.sendall(bytes(3))
        with pytest.raises(ChannelError):
            there.receive()
