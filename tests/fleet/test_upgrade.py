"""A run that another version of Fleetune began: it goes on, or one line says whose it is."""

import json
import sqlite3
import tarfile
from contextlib import closing

import msgspec
import numpy as np
import pytest
from msgspec import UNSET
from msgspec.structs import replace
from tests.fleet.test_semi_asynchronous import Desk, settings
from tests.helpers.fleet_processes import Fleet
from tests.helpers.places import OLD_STATES
from tests.helpers.played_run import PlayedRun

from fleetune.coordinator.reports.summarise import summary_of
from fleetune.coordinator.rounds.records import RoundRecord, Traffic
from fleetune.coordinator.run.open_or_resume import open_run
from fleetune.coordinator.run.stored_run import look_at
from fleetune.coordinator.store import store_versions
from fleetune.coordinator.store.run_store import RunStore
from fleetune.protocols.errors import SettingError, StoreError, StoreVersion
from fleetune.protocols.settings.run_toml import read_run

OLD_RUN = OLD_STATES / "run-d2699e9.tar.xz"
OLD_RUNS = OLD_STATES / "runs-6e33d00.tar.xz"
with tarfile.open(OLD_RUNS) as found:
    OLD_RUNS_HOLD = sorted(
        tuple(name.split("/")[1:3]) for name in found.getnames() if name.endswith("/end.json")
    )
OLD_WINDOW = OLD_RUN.with_name("window-d2699e9.tar.xz")


@pytest.fixture
def old(tmp_path):
    """The folder with an old run.toml and `runs/upgraded`, stopped in round 3 of 4."""
    with tarfile.open(OLD_RUN) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def database(folder):
    return closing(sqlite3.connect(folder / "runs" / "upgraded" / "state.sqlite", isolation_level=None))


def begin(folder, **sections):
    """Open the run with today's reading of its run.toml, keys of `sections` changed."""
    settings = read_run(folder / "run.toml")
    changed = {name: replace(getattr(settings, name), **keys) for name, keys in sections.items()}
    return open_run(replace(settings, **changed), folder / "runs" / "upgraded")


def test_an_old_run_is_opened_where_it_was_and_gets_a_version(old):
    with database(old) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (0,)
        rows = connection.execute("SELECT number, record FROM round ORDER BY number").fetchall()
    run = begin(old)
    assert run.resumed
    outcomes = run.controller.resume(0.0)
    assert outcomes == []
    assert run.controller.engine_state.turn == (3, 1)
    assert [msgspec.json.encode(record) for record in run.controller.records()] == [row[1] for row in rows]
    run.store.close()
    with database(old) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (store_versions.VERSION,)


@pytest.mark.fleet
def test_an_old_run_goes_on_to_its_end(old):
    with Fleet(old, (old / "run.toml").read_text()) as fleet:
        fleet.start()
        fleet.coordinator.wait_for("run upgraded-3e2603e7 goes on")
        fleet.wait_finished()
        assert len(fleet.coordinator.lines("round [34]/4")) == 2
    with look_at(old / "runs" / "upgraded") as run:
        records = run.controller.records()
        weights = run.controller.shared_model
    assert [record.number for record in records] == [1, 2, 3, 4, 5]
    assert [len(record.devices) for record in records] == [3] * 5
    assert np.isfinite(weights).all()
    assert records[-1].final_evaluation


def test_an_open_window_of_an_old_run_goes_on_to_the_same_bits(tmp_path):
    """Rows of devices are taken out of the values they stood in; a round of which one reply is in, too."""
    buffer = {"mode": "buffer", "buffer": 2, "max_staleness": 2, "start_with": 4, "deadline_s": 1000.0}
    plain = Desk(tmp_path / "plain", settings(**buffer), restart=False).play()
    with tarfile.open(OLD_WINDOW) as archive:
        archive.extractall(tmp_path / "old", filter="data")
    upgraded = Desk(tmp_path / "old", settings(**buffer), restart=True).play(step=7)
    ends = [desk.run.controller.shared_model.tobytes() for desk in (plain, upgraded)]
    assert ends[0] == ends[1]
    assert plain.run.controller.records() == upgraded.run.controller.records()
    assert upgraded.closed == plain.closed[3:]
    traffic = {
        device: replace(one, paper_down=UNSET, paper_up=UNSET)
        for device, one in plain.run.controller.ledger.traffic.items()
    }
    assert upgraded.run.controller.ledger.traffic == traffic
    assert upgraded.run.store.get("arrived") is None
    for desk in (plain, upgraded):
        desk.run.store.close()


def papers_of(run):
    told = summary_of(run, simulated=False).bytes
    return told.up_paper, told.down_paper


def test_what_papers_would_have_counted_is_counted_from_the_first_task_on_or_never(tmp_path):
    """A part would be no figure of the run: one that began without goes on without, restart by restart."""
    buffer = {"mode": "buffer", "buffer": 2, "max_staleness": 2, "start_with": 4, "deadline_s": 1000.0}
    plain = Desk(tmp_path / "plain", settings(**buffer), restart=False).play()
    struck = Desk(tmp_path / "struck", settings(**buffer), restart=True).play()
    with tarfile.open(OLD_WINDOW) as archive:
        archive.extractall(tmp_path / "old", filter="data")
    upgraded = Desk(tmp_path / "old", settings(**buffer), restart=True).play(step=7)
    updates = sum(one.updates for one in plain.run.controller.ledger.traffic.values())
    tasks = sum(one.tasks for one in plain.run.controller.ledger.traffic.values())
    whole = 4 * plain.enrolment.spec.num_parameters
    assert papers_of(plain.run) == papers_of(struck.run) == (whole * updates, whole * tasks)
    assert papers_of(upgraded.run) == (UNSET, UNSET)
    store = upgraded.run.store
    assert not any(b"paper" in data for data in (store.get("ledger"), *dict(store.rows("traffic")).values()))
    for desk in (plain, struck, upgraded):
        desk.run.store.close()


def test_a_stopped_run_has_the_count_of_one_that_never_stopped(tmp_path):
    """Masks, parts and differences: what is sent again after a restart counts once."""
    for method, encoding in (("fedspu", "sparse"), ("srp-pfed", "lossless"), ("kapc", "raw")):
        told = []
        for stop in (0, 13):
            folder = tmp_path / method / str(stop)
            if stop:
                first = PlayedRun(folder, method, "synchronous", encoding, encoding)
                assert first.play(end=stop) == stop
                assert first.run.controller.finished is None
                first.close()
            run = PlayedRun(folder, method, "synchronous", encoding, encoding)
            run.play(begin=stop)
            told.append((papers_of(run.run), run.run.controller.ledger.traffic))
            run.close()
        assert told[0] == told[1]
        assert min(told[0][0]) > 0


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Runs of every method of commit 6e33d00, stopped in the middle of a round: tests/data/make_runs.py."""
    folder = tmp_path_factory.mktemp("stopped")
    with tarfile.open(OLD_RUNS) as archive:
        archive.extractall(folder, filter="data")
    return folder


def as_told_then(record):
    """Without what methods tell of their inner workings: that release asked for nothing of the kind."""
    replies = {device: replace(reply, diagnostics={}) for device, reply in record.devices.items()}
    return replace(record, diagnostics={}, devices=replies)


@pytest.mark.parametrize(("mode", "method"), OLD_RUNS_HOLD)
def test_a_stopped_run_of_any_method_ends_as_its_own_release_would_have_ended_it(stopped, mode, method):
    """Tasks and replies to the byte, the shared model, the devices' own ones, records and traffic."""
    folder = stopped / mode / method
    then = json.loads((folder / "end.json").read_text())
    run = PlayedRun(folder, method, mode)
    assert run.run.resumed
    run.play(begin=then.pop("begin"))
    now = run.end()
    assert papers_of(run.run) == (UNSET, UNSET)
    run.close()
    assert [as_told_then(record) for record in now.pop("records")] == msgspec.convert(
        then.pop("records"), list[RoundRecord]
    )
    assert now.pop("traffic") == msgspec.convert(then.pop("traffic"), dict[str, Traffic])
    assert json.loads(json.dumps(now)) == then


def test_what_a_release_adds_to_run_toml_strands_no_run(old):
    """As if today's keys were new: the run's settings were stored without them."""
    with database(old) as connection:
        (stored,) = connection.execute("SELECT data FROM value WHERE name = 'settings'").fetchone()
        content = msgspec.json.decode(stored)
        del content["round"]["max_staleness"], content["run"]["rehearsal"], content["paper"]
        connection.execute(
            "UPDATE value SET data = ? WHERE name = 'settings'", (msgspec.json.encode(content),)
        )
    begin(old).store.close()


def test_a_default_that_is_written_out_is_no_difference(old):
    text = (old / "run.toml").read_text()
    (old / "run.toml").write_text(text.replace('name = "fedspu"', 'name = "fedspu"\nearly_stopping = false'))
    begin(old).store.close()
    (old / "run.toml").write_text(text + "\n[compare.fedavg]\n")
    begin(old).store.close()


def test_settings_that_differ_are_named_with_both_values(old):
    with pytest.raises(SettingError) as caught:
        begin(old, training={"batch_size": 8}, data={"mean": 0.25})
    line = str(caught.value)
    assert "data.mean was 0.0 and is 0.25 now, training.batch_size was 16 and is 8 now" in line
    assert "put that back" in line
    assert "another run.name" in line
    settings = read_run(old / "run.toml")
    for method, said in [
        ({"name": "fedavg"}, 'method.name was "fedspu" and is "fedavg" now'),
        ({"name": "fedspu", "early_stopping": True}, "method.early_stopping was false and is true now"),
    ]:
        with pytest.raises(SettingError) as caught:
            open_run(replace(settings, method=method), old / "runs" / "upgraded")
        assert said in str(caught.value)
    assert "round" not in str(caught.value).split("settings: ")[1].split(";")[0]
    begin(old).store.close()


def test_a_store_of_a_newer_version_is_named_and_left_alone(old):
    with database(old) as connection:
        connection.execute("PRAGMA user_version = 1000")
        connection.execute("PRAGMA journal_mode = DELETE")
    for open_it in (lambda: begin(old), lambda: look_at(old / "runs" / "upgraded").__enter__()):
        with pytest.raises(StoreVersion) as caught:
            open_it()
        line = f"is from another version (1000; this program reads up to {store_versions.VERSION})"
        assert line in str(caught.value)
        assert "damaged" not in str(caught.value)
        assert "--fresh" not in str(caught.value)
    with database(old) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (1000,)
        assert connection.execute("SELECT count(*) FROM value").fetchone() == (8,)


def test_settings_of_a_newer_version_name_the_key_that_is_unknown(old):
    with database(old) as connection:
        (stored,) = connection.execute("SELECT data FROM value WHERE name = 'settings'").fetchone()
        content = msgspec.json.decode(stored)
        content["round"]["carrier_pigeons"] = 3
        connection.execute(
            "UPDATE value SET data = ? WHERE name = 'settings'", (msgspec.json.encode(content),)
        )
    with pytest.raises(StoreVersion, match=r"another version \(round\.carrier_pigeons: unknown key"):
        begin(old)


def test_a_file_that_is_no_store_is_called_damaged_not_busy(tmp_path):
    path = tmp_path / "state.sqlite"
    path.write_bytes(b"no database at all" * 500)
    with pytest.raises(StoreError, match="damaged") as caught:
        RunStore.open(path)
    assert "another coordinator" not in str(caught.value)


def test_a_step_that_fails_leaves_the_store_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "state.sqlite"
    RunStore.open(path).close()

    def half(connection):
        connection.execute("CREATE TABLE extra (name TEXT)")
        connection.execute("no SQL")

    monkeypatch.setattr(store_versions, "STEPS", (*store_versions.STEPS, half))
    monkeypatch.setattr(store_versions, "VERSION", store_versions.VERSION + 1)
    with pytest.raises(StoreError):
        RunStore.open(path)
    monkeypatch.undo()
    with closing(RunStore.open(path)) as store:
        assert store.array_names() == set()
    with closing(sqlite3.connect(path)) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        assert connection.execute("PRAGMA user_version").fetchone() == (store_versions.VERSION,)
    assert "extra" not in tables
