"""Tasks as differences to what each device truly holds, however it came, was late or lost its state."""

import shutil
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import pytest
from tests.helpers.played_run import DEVICES, SPEC, PlayedRun

from fleetune.coordinator.rounds.events import DeviceReady, Tick
from fleetune.coordinator.store.run_store import RunStore
from fleetune.coordinator.tasks.device_models import DeviceModels
from fleetune.protocols.errors import ReferenceModelUnknown, StoreError
from fleetune.protocols.method.choice import Budget, DeviceReport
from fleetune.protocols.methods.fedavg import FedAvg
from fleetune.protocols.update import codec
from fleetune.protocols.update.encodings.lossless import Lossless
from fleetune.protocols.update.reference_model import ReferenceModel

NOW = 2000.0  # after the first round's deadline


def ready(played, device, base, now=1.0):
    """The device says what it holds."""
    report = DeviceReport(device, num_samples=10, ratio=DEVICES[device])
    played.take(played.run.controller.handle(DeviceReady(report, base), now))


def begun(folder, name="int8", up="raw"):
    played = PlayedRun(folder, "fedavg", "synchronous", up, name)
    played.play(end=0)
    return played


def all_but(played, late):
    for device in sorted(played.tasks.keys() - {late}):
        played.step(device, 1.0)


def read(played, device):
    return played.sessions[device].reply(played.tasks[device][1], Budget(DEVICES[device]))


def written_with(played, device):
    @dataclass(frozen=True)
    class Task:
        base: str

    return codec.decode(played.tasks[device][1], Task, SPEC).base


def stored(played):
    return played.run.store._connection.execute("SELECT count(*) FROM held_model").fetchone()[0]


@pytest.mark.parametrize("up", ["raw", "sparse", "lowrank"])
def test_a_device_that_was_late_goes_on_from_what_it_holds(tmp_path, up):
    played = begun(tmp_path, up=up)
    all_but(played, "d")
    read(played, "d")  # it does its work, but nobody hears of it in time
    played.take(played.run.controller.handle(Tick(), NOW))
    assert played.run.controller.round_attempt.number == 2
    read(played, "d")
    played.close()


def test_a_device_that_never_took_its_task_says_what_it_holds_and_is_sent_the_difference_to_that(tmp_path):
    played = begun(tmp_path)
    all_but(played, "")
    all_but(played, "d")  # round 2, in which d has its task, and does nothing
    played.take(played.run.controller.handle(Tick(), NOW))
    assert played.run.controller.round_attempt.number == 3
    held = played.sessions["d"].base
    with pytest.raises(ReferenceModelUnknown, match="round 3 is a difference"):
        read(played, "d")
    assert played.sessions["d"].base == held
    ready(played, "d", held, NOW)
    assert written_with(played, "d") == held
    read(played, "d")
    ready(played, "a", "0" * 32, NOW)  # of whom nobody knows what it holds
    assert written_with(played, "a") == ReferenceModel.whole(played.run.enrolment.weights).digest
    read(played, "a")
    played.close()


def test_a_device_that_lost_its_state_starts_from_the_first_weights(tmp_path):
    played = begun(tmp_path)
    all_but(played, "")
    all_but(played, "")
    shutil.rmtree(tmp_path / "agents" / "fleet" / "d")
    played.sessions["d"] = played.session("d")
    with pytest.raises(ReferenceModelUnknown):
        read(played, "d")
    ready(played, "d", played.sessions["d"].base)
    assert written_with(played, "d") == played.sessions["d"].base
    read(played, "d")
    played.close()


def test_a_device_whose_reply_is_on_the_way_is_not_taken_for_lost(tmp_path):
    played = begun(tmp_path)
    turn, task = played.tasks["d"]
    reply = read(played, "d")
    played.sessions["d"] = played.session("d")  # its agent starts anew before it could send that
    ready(played, "d", played.sessions["d"].base)
    assert played.tasks["d"] == (turn, task)
    assert read(played, "d") == reply
    played.close()


def test_an_agent_that_knows_of_no_differences_is_sent_what_it_always_was(tmp_path):
    plain, played = begun(tmp_path / "raw", "raw"), begun(tmp_path / "int8")
    for run in (plain, played):
        ready(run, "d", None)
    assert played.tasks["d"] == plain.tasks["d"]
    read(played, "d")
    plain.close()
    played.close()


def test_what_all_are_sent_alike_is_written_once_and_kept_once(tmp_path, monkeypatch):
    written, encode = [], Lossless.encode

    def counted(self, *given):
        written.append(given)
        return encode(self, *given)

    monkeypatch.setattr(Lossless, "encode", counted)
    played = begun(tmp_path, "lossless")
    all_but(played, "")
    assert len(written) == 2  # round 1 and round 2
    assert stored(played) == 0  # the first weights, which all have
    all_but(played, "")
    assert stored(played) == 1
    assert len({session.base for session in played.sessions.values()}) == 1
    played.close()


def test_what_a_lossy_downlink_left_out_is_not_lost_to_the_coordinator(tmp_path, monkeypatch):
    def shared(name, down):
        played = begun(tmp_path / name, down, up="lossless")
        for _ in range(3):
            all_but(played, "")
        model = played.run.controller.shared_model
        played.close()
        return model

    whole, moved = shared("raw", "raw"), shared("int4", "int4")
    monkeypatch.setattr(FedAvg, "starts_from_task", False)
    lost = shared("lost", "int4")
    assert 0 < np.abs(moved - whole).max() < 0.6 * np.abs(lost - whole).max()


def test_tasks_of_a_final_evaluation_leave_what_a_device_holds(tmp_path):
    played = begun(tmp_path)
    while played.run.controller.finished is None:
        if played.run.controller.engine_state.stage == "evaluating":
            before = {device: session.base for device, session in played.sessions.items()}
        all_but(played, "")
    assert {device: session.base for device, session in played.sessions.items()} == before
    played.close()


def test_a_model_kept_under_another_ones_name_ends_the_run_instead_of_misleading_devices(tmp_path):
    with closing(RunStore.open(tmp_path / "run.sqlite")) as store:
        weights = np.zeros(SPEC.size, np.float32)
        held = DeviceModels(store, SPEC, weights)
        with store.step():
            for number in (1, 2):
                held.advance(f"device-{number}", ReferenceModel.whole(weights + number))
            other = store.held_model(ReferenceModel.whole(weights + 2).digest)
            store.add_held_model(ReferenceModel.whole(weights + 1).digest, [other])
        fresh = DeviceModels(store, SPEC, weights)
        fresh.recall()
        assert fresh.of("device-2").values[0] == 2
        with pytest.raises(StoreError, match="damaged: a model that devices hold is another one"):
            fresh.of("device-1")


def test_small_models_that_devices_hold_are_read_once(tmp_path, monkeypatch):
    read, held_model = [], RunStore.held_model

    def counted(store, digest):
        read.append(digest)
        return held_model(store, digest)

    monkeypatch.setattr(RunStore, "held_model", counted)
    with closing(RunStore.open(tmp_path / "run.sqlite")) as store:
        weights = np.zeros(SPEC.size, np.float32)
        held = DeviceModels(store, SPEC, weights)
        with store.step():
            for number in range(1, 21):
                held.advance(f"device-{number}", ReferenceModel.whole(weights + number))
        fresh = DeviceModels(store, SPEC, weights)
        fresh.recall()
        for _ in range(3):
            for number in range(1, 21):
                assert fresh.of(f"device-{number}").values[0] == number
        assert len(read) == 20
