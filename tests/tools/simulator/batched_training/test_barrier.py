"""Threads that wait for each other, and what is done for all of them."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from fleetune.protocols.errors import TrainingStopped
from fleetune.tools.simulator.batched_training.barrier import Barrier

PATIENCE_S = 30


def played(barrier, *players):
    """Each player at a slot; what they return, or raise."""
    barrier.begin(range(len(players)))

    def play(slot):
        with barrier.slot(slot):
            try:
                return players[slot](lambda what: barrier.request(slot, what))
            except Exception as fault:  # noqa: BLE001 - looked at
                return fault

    with ThreadPoolExecutor(len(players)) as threads:
        return list(threads.map(play, range(len(players)), timeout=PATIENCE_S))


def test_all_are_waited_for_whoever_is_quicker():
    groups = []

    def together(asked):
        groups.append(dict(asked))
        return {slot: 10 * what for slot, what in asked.items()}

    def often(ask, times):
        return [ask(number) for number in range(times)]

    players = [lambda ask, times=times: often(ask, times) for times in (1, 3, 0, 2)]
    assert played(Barrier(together), *players) == [[0], [0, 10, 20], [], [0, 10]]
    by_call = [set(group) for group in groups]
    assert by_call == [{0, 1, 3}, {1, 3}, {1}]
    assert [list(group) for group in groups] == [sorted(group) for group in groups]


def test_an_exception_is_its_own_seats():
    def together(asked):
        return {slot: ValueError("this one") if slot == 1 else what for slot, what in asked.items()}

    found = played(Barrier(together), *3 * [lambda ask: ask("x")])
    assert found[0] == found[2] == "x"
    assert str(found[1]) == "this one"


def test_a_fault_of_all_leaves_nobody_waiting():
    found = played(Barrier(lambda _: 1 / 0), *3 * [lambda ask: ask("x")])
    assert all(isinstance(one, ZeroDivisionError) for one in found)


def test_when_it_breaks_up_nobody_is_waited_for():
    barrier, waiting = Barrier(lambda asked: asked), threading.Event()
    barrier.begin(range(2))

    def wait():
        with barrier.slot(0):
            waiting.set()
            barrier.request(0, "x")

    with ThreadPoolExecutor(1) as threads:
        one = threads.submit(wait)
        assert waiting.wait(PATIENCE_S)
        barrier.cancel()
        with pytest.raises(TrainingStopped):
            one.result(PATIENCE_S)
    with barrier.slot(1), pytest.raises(TrainingStopped):
        barrier.request(1, "x")


def test_only_one_moves_at_a_time():
    moving, met = [], []

    def move(ask):
        for _ in range(20):
            moving.append(1)
            time.sleep(0.0002)  # others would come in between
            met.append(len(moving))
            moving.pop()
            ask("x")

    assert played(Barrier(lambda asked: asked), *4 * [move]) == 4 * [None]
    assert set(met) == {1}
