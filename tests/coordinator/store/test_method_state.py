"""The method's state on disk: the same bits again, nothing written twice, and damage that is named."""

import sqlite3
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import pytest
from tests.fleet.test_semi_asynchronous import Desk, settings
from tests.helpers.nightly import of_methods
from tests.protocols.methods.test_method_contract import SETTINGS, SPEC, Run

from fleetune.coordinator.run.stored_run import look_at
from fleetune.coordinator.store import method_state
from fleetune.coordinator.store.method_state import read_state, write_state
from fleetune.coordinator.store.run_store import RunStore
from fleetune.protocols.errors import StoreError
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.update import codec
from fleetune.protocols.update.patch import Patch


@dataclass(frozen=True)
class State:
    models: dict[str, FlatArray]
    small: FlatArray


LARGE = np.arange(method_state.APART_BYTES // 4, dtype=np.float32)
STATE = State({"a": LARGE, "b": -LARGE, "c": LARGE.copy()}, LARGE[:10])


@pytest.fixture
def store(tmp_path):
    with closing(RunStore.open(tmp_path / "state.sqlite", durable=False)) as opened:
        yield opened


@pytest.fixture
def all_apart(monkeypatch):
    monkeypatch.setattr(method_state, "APART_BYTES", 1)


def write(store, state):
    with store.step():
        write_state(store, state, SPEC)


def read(store):
    return read_state(store, State, SPEC)


@pytest.mark.usefixtures("all_apart")
@pytest.mark.parametrize(
    "kind", of_methods(SETTINGS, as_one=True), ids=lambda kind: "-".join([kind[0], *kind[1]])
)
def test_a_restart_in_the_middle_changes_nothing(kind, weights, tmp_path):
    calm, shaken = Run(*kind, weights), Run(*kind, weights)
    for number in (1, 2, 3):
        calm.round(number)
        shaken.round(number)
        with closing(RunStore.open(tmp_path / "state.sqlite", durable=False)) as store:
            write(store, shaken.state)
            assert store.array_names()
        with closing(RunStore.open(tmp_path / "state.sqlite", durable=False)) as store:
            shaken.state = read_state(store, shaken.method.state_type, SPEC)
    assert shaken.content() == calm.content()
    assert codec.encode(shaken.state, SPEC) == codec.encode(calm.state, SPEC)


class CoachedDesk(Desk):
    """KAPC's, which holds a model of every device."""

    def update(self, weights):
        method = self.run.method
        layers = method._named(range(len(method.layers)))
        return method.update_type(Patch.of(weights, layers, self.enrolment.spec))


def test_a_coordinator_that_is_killed_between_any_two_events_ends_with_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(method_state, "APART_BYTES", 4096)  # the cube is smaller, the models are larger
    options = settings("kapc", rounds=4, start_with=4, deadline_s=1000.0)
    plain = CoachedDesk(tmp_path / "plain", options, restart=False).play()
    struck = CoachedDesk(tmp_path / "struck", options, restart=True).play()
    states = [codec.encode(desk.run.controller.method_state, desk.enrolment.spec) for desk in (plain, struck)]
    assert states[0] == states[1]
    assert plain.closed == struck.closed
    for desk in (plain, struck):
        assert len(desk.run.store.array_names()) == 1 + len(Desk.DEVICES)  # their models, and the initial one
        desk.run.store.close()


def test_equal_arrays_lie_there_once_and_those_that_stayed_are_not_written_again(store, monkeypatch):
    write(store, STATE)
    before = store.array_names()
    assert len(before) == 2
    assert len(store.get("state")) < 1000
    written = []
    monkeypatch.setattr(RunStore, "add_array", lambda _, name, __: written.append(name))
    write(store, State({**STATE.models, "d": LARGE}, STATE.small))
    assert not written
    monkeypatch.undo()
    write(store, State({"b": STATE.models["b"], "d": LARGE + 1}, STATE.small))
    assert len(store.array_names()) == 2
    assert len(store.array_names() - before) == 1


def test_arrays_of_the_same_bytes_and_another_type_or_shape_are_others(store):
    odd = LARGE.copy()
    odd[:3] = [np.nan, -0.0, np.inf]
    arrays = {
        "line": odd,
        "square": odd.reshape(2, -1),
        "wide": odd.view(np.float64),
        "whole": odd.view(np.int64),
        "zero": np.zeros_like(LARGE),
        "minus": -np.zeros_like(LARGE),
        "mask": np.arange(method_state.APART_BYTES) % 3 == 0,
    }
    write(store, State(arrays, STATE.small))
    assert len(store.array_names()) == len(arrays)
    for name, array in read(store).models.items():
        assert (array.dtype, array.shape) == (arrays[name].dtype, arrays[name].shape)
        assert array.tobytes() == arrays[name].tobytes()


def fill_the_disk(store, state):
    write_state(store, state, SPEC)
    raise sqlite3.OperationalError("database or disk is full")


def test_a_step_that_fails_leaves_the_state_before(store):
    write(store, STATE)
    with pytest.raises(StoreError, match="cannot write"), store.step():
        fill_the_disk(store, State({"a": LARGE + 1}, LARGE[:3]))
    assert codec.encode(read(store), SPEC) == codec.encode(STATE, SPEC)
    assert len(store.array_names()) == 2


def test_a_state_that_was_written_whole_is_read_as_well(store):
    with store.step():
        store.put("state", codec.encode(STATE, SPEC))
    assert codec.encode(read(store), SPEC) == codec.encode(STATE, SPEC)


def flip_a_bit(database):
    [(name, data)] = database.execute("SELECT name, data FROM array LIMIT 1")
    damaged = data[:-1] + bytes([data[-1] ^ 1])
    database.execute("UPDATE array SET data = ? WHERE name = ?", (damaged, name))


def swap(database):
    (one, _), (_, data) = database.execute("SELECT name, data FROM array")
    database.execute("UPDATE array SET data = ? WHERE name = ?", (data, one))


def lose(database):
    database.execute("DELETE FROM array WHERE rowid = 1")


def cut_the_state(database):
    database.execute("UPDATE value SET data = substr(data, 1, 100) WHERE name = 'state'")


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (flip_a_bit, "checksum differs"),
        (swap, "is another one"),
        (lose, "is missing"),
        (cut_the_state, "checksum differs"),
    ],
)
def test_damage_is_found_and_named_in_one_line(tmp_path, damage, what):
    path = tmp_path / "state.sqlite"
    with closing(RunStore.open(path, durable=False)) as store:
        write(store, STATE)
    with closing(sqlite3.connect(path)) as database, database:
        damage(database)
    with closing(RunStore.open(path, durable=False)) as store, pytest.raises(StoreError) as caught:
        read(store)
    assert what in str(caught.value)
    assert str(caught.value).startswith(f"{path}: the method's state is damaged")
    assert "\n" not in str(caught.value)


def test_a_file_with_bad_pages_is_named_in_one_line(tmp_path):
    Desk(tmp_path, settings(rounds=1, start_with=4), restart=False).play().run.store.close()
    path = tmp_path / "state.sqlite"
    content = bytearray(path.read_bytes())
    content[8192:] = bytes(len(content) - 8192)
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"state\.sqlite: "), look_at(tmp_path):
        pass
