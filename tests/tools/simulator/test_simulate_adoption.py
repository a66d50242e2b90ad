"""Runs with [adoption], simulated: alone is local-only to the last bit; what is told is what is served."""

import io

import numpy as np
import pytest
from msgspec import UNSET
from rich.console import Console
from tests.tools.simulator.test_simulate import settings

from fleetune.coordinator.queries.run_status import StatusReader
from fleetune.coordinator.reports.live import LiveView, plain_line
from fleetune.coordinator.run.stored_run import stored_run
from fleetune.coordinator.store.device_rows import read_engine, read_ledger
from fleetune.edge_agent.extensions.adoption.deployed_model import read_deployed
from fleetune.edge_agent.extensions.session_state import read_state
from fleetune.protocols.methods import from_section
from fleetune.tools.simulator import starting_models
from fleetune.tools.simulator.runner import simulate

NAMES = [f"device-{index}" for index in range(6)]
ROUND = {"participants": 4}  # not everybody is asked in every round


def play(folder, method="fedavg", final_evaluation=True, training=(), **adoption):
    wanted = settings(
        training=dict(training),
        run={"name": "sim", "rounds": 5, "final_evaluation": final_evaluation},
        method={"name": method},
        data={"partition": {"kind": "iid", "samples": 60, "test_fraction": 0.5}},
        round=ROUND,
        encoding={"up": "raw", "down": "raw"},  # bytes are the same for whatever was learned
        adoption=adoption,
    )
    run, summary = simulate(wanted, folder, workers=0, fresh=True)
    run.store.close()
    return run, summary


def sessions(run):
    spec = run.enrolment.spec
    method = from_section(run.enrolment.method, spec)
    found = {name: starting_models.state_file(run.folder / "devices", name).read() for name in NAMES}
    return {name: read_state(data, method) for name, data in found.items() if data is not None}


def served(run):
    return {
        name: read_deployed(
            starting_models.deployed_file(run.folder / "devices", name).read(), run.enrolment.spec
        )
        for name in NAMES
    }


@pytest.fixture(scope="module")
def gated(tmp_path_factory):
    return play(tmp_path_factory.mktemp("gated") / "sim", enabled=True, confidence=0.5)


def test_what_is_trained_alone_on_all_samples_is_what_local_only_leads_to(gated, tmp_path):
    run, _ = gated
    local, _ = play(tmp_path / "sim", "local-only")
    kept, theirs = sessions(run), sessions(local)
    assert len(kept) >= 4
    for name, session in kept.items():
        assert session.slots["local_only"].on_all.tobytes() == theirs[name].state.weights.tobytes()
        assert session.slots["local_only"].weights.tobytes() != session.slots["local_only"].on_all.tobytes()
    served_there = served(local)
    alone = {name: one for name, one in served(run).items() if one.record.local_only}
    assert 0 < len(alone) < 6
    for name, one in alone.items():
        assert one.weights.tobytes() == served_there[name].weights.tobytes()


def test_alone_keeps_its_own_optimiser_where_the_run_keeps_that_on_devices(tmp_path):
    training = {"optimiser": "adamw", "learning_rate": 0.01, "optimiser_state": "device"}
    found, theirs = (
        sessions(play(tmp_path / name, method, False, training, **adoption)[0])
        for name, method, adoption in (("sim", "fedavg", {"enabled": True}), ("local", "local-only", {}))
    )
    assert len(found) >= 4
    for name, session in found.items():
        assert session.slots["local_only"].on_all.tobytes() == theirs[name].state.weights.tobytes()
        judged, on_all = session.slots["local_only"].optimiser
        assert all(map(np.array_equal, on_all.vectors, theirs[name].slots["optimiser"][0].vectors))
        assert not all(map(np.array_equal, judged.vectors, on_all.vectors))


def test_the_summary_tells_what_devices_serve(gated):
    run, summary = gated
    models = served(run)
    adopted = {name for name, one in models.items() if not one.record.local_only}
    assert {name for name, row in summary.by_device.items() if row.adoption.adopted} == adopted
    assert (summary.adoption.devices, summary.adoption.adopted) == (6, len(adopted))
    for name, row in summary.by_device.items():
        assert row.deployed == pytest.approx(row.adoption.local_only + row.adoption.gain)
        if name not in adopted:
            assert (row.adoption.gain, row.adoption.gain_error) == (0.0, 0.0)
    gains = [row.adoption.gain for row in summary.by_device.values()]
    assert summary.adoption.gain == pytest.approx(np.mean(gains))
    assert summary.adoption.low <= summary.adoption.gain <= summary.adoption.high


def test_a_run_without_is_as_before_and_nothing_of_it_travels(tmp_path):
    run, summary = play(tmp_path / "sim")
    assert run.enrolment.adoption is UNSET
    assert b"adoption" not in run.payload
    assert summary.adoption is UNSET
    assert not list((run.folder / "devices").glob("*.versions"))
    assert all("local_only" not in session.slots for session in sessions(run).values())


def test_an_open_run_hears_who_adopted_as_it_goes_on(tmp_path):
    """The same figures without a final evaluation: each device's latest reply, in every place that tells."""
    run, summary = play(tmp_path / "sim", final_evaluation=False, enabled=True, confidence=0.5)
    with stored_run(run.folder) as stored:
        records = stored.store.records()
        state, ledger = read_engine(stored.store), read_ledger(stored.store)
    told = {device: reply.measures for record in records for device, reply in record.devices.items()}
    assert all(one.kept is UNSET for one in told.values())
    models = served(run)
    assert {device: one.adopted for device, one in told.items()} == {
        device: not models[device].record.local_only for device in told
    }
    assert {device for device, row in summary.by_device.items() if row.adoption} == told.keys()
    assert summary.adoption.devices == len(told) >= 4
    assert summary.adoption.gain == pytest.approx(np.mean([one.gain for one in told.values()]))
    reader = StatusReader(run.settings, run.enrolment.spec.num_parameters)
    for record in records:
        reader.add(record)
    shot = reader.status(state, ledger, 0.0)
    assert shot.adoption == summary.adoption
    words = f"{summary.adoption.adopted} of {summary.adoption.devices}"
    assert f"adopted   {words}, " in shown(LiveView(shot))
    assert plain_line(records[-1], run.settings).count("adopted") == 1


def shown(view):
    screen = Console(file=io.StringIO(), width=80, height=40)
    screen.print(view)
    return screen.file.getvalue()


def test_it_costs_what_it_is_said_to(gated, tmp_path):
    """Training alone twice beside FedAvg; what is held out is not trained on, and evaluations are as ever."""
    _, summary = gated
    _, plain = play(tmp_path / "sim")
    assert 1.9 < summary.seconds.train / plain.seconds.train < 3.0
    assert summary.bytes.up == pytest.approx(plain.bytes.up, rel=0.01)
