"""What a method tells of its inner workings goes into the records, and is never in a round's way."""

import json
import logging

import msgspec
import pytest
from tests.helpers.hostile_world import DEVICES, SPEC, World, stores_closed  # noqa: F401 - a fixture
from tests.helpers.telling_methods import DIAGNOSTICS

from fleetune.coordinator.extensions.method_diagnostics import MethodDiagnostics
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.protocols.method.diagnostics import MOST_PARTS, declared_diagnostics
from fleetune.protocols.methods import create, diagnostics_of

TELLING = "tests.helpers.telling_methods"


def played(folder, method, weights, *, restart=False, **settings):
    world = World(folder, method, {}, weights, **settings)
    world.join()
    steps = 0
    while world.finished is None:
        world.step()
        steps += 1
        if restart and steps % 3 == 0:
            world.restart()
    assert world.finished == "all rounds are done"
    return world


def test_records_have_what_the_method_tells_of_each_update_and_each_round(weights, tmp_path):
    records = played(tmp_path, f"{TELLING}:Telling", weights).controller.records()
    layers = [tensor.name for tensor in SPEC.tensors]
    assert [set(record.devices) for record in records] == [set(DEVICES)] * 4
    for record in records:
        for reply in record.devices.values():
            assert reply.diagnostics["sent"] == 0.25
            assert list(reply.diagnostics["peak"]) == layers
        assert record.diagnostics["spread"] > 0
        assert record.diagnostics["kept"] == dict.fromkeys(layers, 0.1)


def test_they_are_the_same_when_the_coordinator_is_killed_in_the_midst(weights, tmp_path):
    runs = [
        played(tmp_path / str(restart), f"{TELLING}:Telling", weights, restart=restart)
        for restart in (False, True)
    ]
    told = [
        [
            (one.diagnostics, {name: reply.diagnostics for name, reply in one.devices.items()})
            for one in records
        ]
        for records in (run.controller.records() for run in runs)
    ]
    assert told[0] == told[1]


@pytest.mark.parametrize("method", ["Raising", "Wrong", "NoMapping"])
def test_what_is_wrong_of_a_report_harms_no_round_and_is_logged_once(weights, tmp_path, caplog, method):
    plain = played(tmp_path / "plain", "fedavg", weights)
    with caplog.at_level(logging.WARNING):
        world = played(tmp_path / "told", f"{TELLING}:{method}", weights)
    assert world.shared().tobytes() == plain.shared().tobytes()
    lines = [record.message for record in caplog.records if "diagnostic of the method" in record.message]
    assert len(lines) == len(set(lines)) >= 2
    for record in world.controller.records():
        assert all(not reply.diagnostics for reply in record.devices.values())
        assert "spread" not in record.diagnostics
        parts = record.diagnostics.get("kept", {})
        assert len(parts) == (MOST_PARTS - 2 if method == "Wrong" else 0)
        assert all(value <= MOST_PARTS for value in parts.values())


def test_the_final_evaluation_tells_nothing_because_nothing_is_sent(weights, tmp_path):
    world = World(tmp_path, f"{TELLING}:Telling", {}, weights)
    assert MethodDiagnostics(world.run.method).of_update(None) == {}


def test_only_what_is_well_declared_counts():
    assert declared_diagnostics(create(f"{TELLING}:NoMapping", SPEC, {})) == DIAGNOSTICS
    assert diagnostics_of({"name": f"{TELLING}:Telling"}) == DIAGNOSTICS
    assert diagnostics_of({"name": "nowhere:Method"}) == diagnostics_of({}) == ()
    assert declared_diagnostics(object()) == ()


def test_records_of_older_releases_are_read_and_written_as_they_were(weights, tmp_path):
    records = played(tmp_path, "fedavg", weights).controller.records()
    for record in records:
        line = msgspec.json.encode(record)
        assert b"diagnostics" not in line
        assert msgspec.json.encode(msgspec.json.decode(line, type=RoundRecord)) == line


def test_of_numbers_as_many_digits_are_kept_as_float32_knows(weights, tmp_path):
    line = msgspec.json.encode(played(tmp_path, f"{TELLING}:Telling", weights).controller.records()[0])
    told = json.loads(line)["devices"]["a"]["diagnostics"]["peak"].values()
    assert all(len(repr(value)) <= 12 for value in told)
