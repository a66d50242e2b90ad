"""Replies of the open round: the same from the store and at hand, and whoever reads one may change it."""

from contextlib import closing
from itertools import pairwise

import numpy as np
import pytest
from tests.helpers.hostile_world import SPEC

from fleetune.coordinator.store import open_replies
from fleetune.coordinator.store.open_replies import OpenReplies
from fleetune.coordinator.store.run_store import RunStore
from fleetune.protocols.errors import StoreError
from fleetune.protocols.method.averaging import Update
from fleetune.protocols.methods import create
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Everything
from fleetune.protocols.wire.payloads import Measures, Reply


def reply(device, factor=1.0):
    values = np.arange(SPEC.size, dtype=np.float32) * np.float32(factor)
    update = Update(Patch.of(values, Everything(), SPEC), 5)
    return Reply(device, 1, 1, False, Measures(num_samples=5, num_test=1), update)


@pytest.fixture(params=[False, True], ids=["in the store", "at hand"])
def replies(request, tmp_path):
    with closing(RunStore.open(tmp_path / "state.sqlite", durable=False)) as store:
        yield OpenReplies(store, create("fedavg", SPEC, {}), in_memory=request.param)


def values_of(replies, device):
    return replies.read(device).update.patch.values


def test_what_is_read_is_what_was_kept_and_the_readers_own(replies):
    replies.add(reply("a"))
    values_of(replies, "a")[:] = -1
    found = replies.read("a")
    assert found.measures == Measures(num_samples=5, num_test=1)
    assert found.update.patch.values.tobytes() == reply("a").update.patch.values.tobytes()


def test_a_later_reply_takes_the_place_of_the_one_before(replies):
    replies.add(reply("a"))
    replies.add(reply("a", 2.0))
    assert values_of(replies, "a").tobytes() == reply("a", 2.0).update.patch.values.tobytes()


def test_when_the_round_is_over_there_are_none(replies):
    replies.add(reply("a"))
    replies.drop()
    with pytest.raises(StoreError, match="the reply of a is missing"):
        replies.read("a")


def test_those_that_find_no_room_are_in_the_store(replies, monkeypatch):
    monkeypatch.setattr(open_replies, "_MOST_BYTES", 2 * 8 * SPEC.size)
    for device in "abcd":
        replies.add(reply(device, ord(device)))
    found = [values_of(replies, device) for device in "abcd"]
    assert all(after[1] - before[1] == 1 for before, after in pairwise(found))
    kept_in_store = [name for (name,) in replies.store._rows("SELECT device FROM reply ORDER BY device")]
    assert kept_in_store == (["c", "d"] if replies.in_memory else [*"abcd"])
