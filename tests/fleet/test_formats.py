"""Another format version is refused in one line that names both versions; nothing is changed."""

import sqlite3
from contextlib import closing

import msgspec
import pytest
from msgspec.structs import replace
from tests.conftest import tiny_spec
from tests.fleet.test_semi_asynchronous import Desk, settings
from tests.helpers.played_run import PlayedRun

from fleetune.coordinator.metrics.summary import FORMAT, SUMMARY, Summary, encoded, read_summary
from fleetune.coordinator.reports.report import summary_of
from fleetune.coordinator.run.open_or_resume import open_run
from fleetune.coordinator.run.stored_run import look_at
from fleetune.coordinator.store.run_folder import clear
from fleetune.coordinator.store.run_store import RunStore
from fleetune.coordinator.store.run_tables import FORMAT as RUN_FORMAT
from fleetune.protocols.bundle.bundle import read_bundle
from fleetune.protocols.errors import PacketVersion, SettingError, StoreError, StoreVersion
from fleetune.protocols.update import codec
from fleetune.protocols.wire import messages

STEPS = {"start_with": 4, "deadline_s": 1000.0}


@pytest.fixture
def begun(tmp_path):
    """The folder and the settings of a run that was stopped after its second round."""
    asked = settings(**STEPS)
    desk = Desk(tmp_path / "run", asked, restart=False)
    desk.play(until_closed=2)
    desk.run.store.close()
    return desk.folder, asked


def database(folder):
    return closing(sqlite3.connect(folder / "state.sqlite", isolation_level=None))


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("other", [1, RUN_FORMAT.number - 1, RUN_FORMAT.number + 1])
def test_the_store_of_a_run(begun, other):
    folder, asked = begun
    with database(folder) as connection:
        connection.execute(f"PRAGMA user_version = {other}")
        connection.execute("PRAGMA journal_mode = DELETE")
    before = contents(folder)
    for open_it in (lambda: open_run(asked, folder), lambda: look_at(folder).__enter__()):
        with pytest.raises(StoreVersion) as caught:
            open_it()
        line = str(caught.value)
        assert f"state.sqlite has format {other}; this program reads format {RUN_FORMAT.number}: " in line
        assert "install the version of fleetune that wrote it" in line
        assert "\n" not in line
    assert contents(folder) == before


def test_the_enrolment_of_a_run(begun):
    folder, asked = begun
    with database(folder) as connection:
        (payload,) = connection.execute("SELECT data FROM value WHERE name = 'enrolment'").fetchone()
        changed = payload[:4] + bytes([99]) + payload[5:]
        connection.execute("UPDATE value SET data = ? WHERE name = 'enrolment'", (changed,))
        before = [*connection.iterdump()]
    for open_it in (lambda: open_run(asked, folder), lambda: look_at(folder).__enter__()):
        with pytest.raises(StoreVersion, match=r"the enrolment in .*has format 99; this program reads"):
            open_it()
    with database(folder) as connection:
        assert [*connection.iterdump()] == before


@pytest.mark.parametrize("read", [read_bundle, lambda data: codec.decode(data, int, None)])
def test_a_payload_and_a_bundle(read):
    data = codec.encode(7, tiny_spec())
    with pytest.raises(PacketVersion, match=r"has format 99; this program reads format .*fleetune"):
        read(data[:4] + bytes([99]) + data[5:])
    with pytest.raises(PacketVersion, match="it is not a payload of fleetune"):
        read(b"PK\3\4" + data[4:])


@pytest.mark.parametrize("more", ["", ', "mood": "good"', ', "instance": 7'])
def test_a_message(more):
    """An agent of another version may write keys that are unknown here."""
    data = f'{{"type":"Presence","online":true,"agent":"fleetune 9","version":2{more}}}'.encode()
    with pytest.raises(PacketVersion) as caught:
        messages.read_from_device(data)
    line = str(caught.value)
    assert "the message of agent fleetune 9 has format 2; this program reads format 1: install" in line


def test_a_summary(tmp_path):
    (tmp_path / SUMMARY).write_bytes(encoded(Summary(method="fedavg")))
    assert read_summary(tmp_path) == Summary(method="fedavg")
    for text, found in ((f'{{"format": {FORMAT + 1}, "x": 1}}', FORMAT + 1), ('{"method": "fedavg"}', 0)):
        (tmp_path / SUMMARY).write_text(text)
        with pytest.raises(StoreVersion, match=f"has format {found}; this program reads format {FORMAT}: "):
            read_summary(tmp_path)
        assert (tmp_path / SUMMARY).read_text() == text


def test_a_run_of_another_format_can_be_removed(begun):
    folder, _ = begun
    with database(folder) as connection:
        connection.execute("PRAGMA user_version = 1")
    clear(folder)
    assert not folder.exists() or not contents(folder)


def test_settings_that_cannot_be_read_name_the_key(begun):
    folder, asked = begun
    with database(folder) as connection:
        (stored,) = connection.execute("SELECT data FROM value WHERE name = 'settings'").fetchone()
        content = msgspec.json.decode(stored)
        content["round"]["carrier_pigeons"] = 3
        changed = msgspec.json.encode(content)
        connection.execute("UPDATE value SET data = ? WHERE name = 'settings'", (changed,))
    with pytest.raises(StoreError, match=r"cannot read \(round\.carrier_pigeons: unknown key"):
        open_run(asked, folder)


def test_a_default_that_is_written_out_is_no_difference(begun):
    folder, asked = begun
    written_out = replace(asked, method={"name": "fedavg", "server_momentum": 0.0}, compare={"fedper": {}})
    open_run(written_out, folder).store.close()


def test_settings_that_differ_are_named_with_both_values(begun):
    folder, asked = begun
    changed = replace(
        asked, training=replace(asked.training, batch_size=8), data=replace(asked.data, mean=0.25)
    )
    with pytest.raises(SettingError) as caught:
        open_run(changed, folder)
    line = str(caught.value)
    assert "data.mean was 0.0 and is 0.25 now, training.batch_size was 10 and is 8 now" in line
    assert "another run.name" in line
    assert "round" not in line.split("settings: ")[1].split(";", maxsplit=1)[0]
    for method, said in [
        ({"name": "fedspu"}, 'method.name was "fedavg" and is "fedspu" now'),
        ({"name": "fedavg", "server_momentum": 0.5}, "method.server_momentum was 0.0 and is 0.5 now"),
    ]:
        with pytest.raises(SettingError) as caught:
            open_run(replace(asked, method=method), folder)
        assert said in str(caught.value)
    open_run(asked, folder).store.close()


def test_a_file_that_is_no_store_is_called_damaged_not_busy(tmp_path):
    path = tmp_path / "state.sqlite"
    path.write_bytes(b"no database at all" * 500)
    with pytest.raises(StoreError, match="damaged") as caught:
        RunStore.open(path)
    assert "another coordinator" not in str(caught.value)


def papers_of(run):
    counted = summary_of(run, simulated=False).bytes
    return counted.up_paper, counted.down_paper


def test_a_restarted_run_counts_what_papers_count_as_one_without_restarts(tmp_path):
    buffer = {"mode": "buffer", "buffer": 2, "max_staleness": 2, **STEPS}
    plain = Desk(tmp_path / "plain", settings(**buffer), restart=False).play()
    struck = Desk(tmp_path / "struck", settings(**buffer), restart=True).play()
    updates = sum(one.updates for one in plain.run.controller.ledger.traffic.values())
    tasks = sum(one.tasks for one in plain.run.controller.ledger.traffic.values())
    whole = 4 * plain.enrolment.spec.num_parameters
    assert papers_of(plain.run) == papers_of(struck.run) == (whole * updates, whole * tasks)
    for desk in (plain, struck):
        desk.run.store.close()


def test_a_stopped_run_has_the_count_of_one_that_never_stopped(tmp_path):
    """Masks, parts and differences: what is sent again after a restart counts once."""
    for method, encoding in (("fedspu", "sparse"), ("srp-pfed", "lossless"), ("kapc", "raw")):
        counts = []
        for stop in (0, 13):
            folder = tmp_path / method / str(stop)
            if stop:
                first = PlayedRun(folder, method, "synchronous", encoding, encoding)
                assert first.play(end=stop) == stop
                assert first.run.controller.finished is None
                first.close()
            run = PlayedRun(folder, method, "synchronous", encoding, encoding)
            run.play(begin=stop)
            counts.append((papers_of(run.run), run.run.controller.ledger.traffic))
            run.close()
        assert counts[0] == counts[1]
        assert min(counts[0][0]) > 0
