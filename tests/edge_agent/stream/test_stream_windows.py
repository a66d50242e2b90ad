"""Windows that a device makes of growing files and of messages: none across a gap, also after a crash."""

import json

import numpy as np
import pytest
from msgspec import structs
from tests.edge_agent.stream.test_intakes import Looking, inputs_of, kept, refused
from typer.testing import CliRunner

from fleetune.edge_agent import cli
from fleetune.edge_agent.datasets.series_options import SeriesOptions
from fleetune.edge_agent.stream import series_states
from fleetune.edge_agent.stream.deletion import SampleFilter
from fleetune.edge_agent.stream.intakes.json_rows import cells_of, path_steps
from fleetune.edge_agent.stream.intakes.mqtt import MessageSeries, _Message, sensor_topic
from fleetune.edge_agent.stream.sample import BadSample
from fleetune.edge_agent.stream.sample_store import SampleStore
from fleetune.protocols.errors import DataError, StoreError


@pytest.fixture
def store(tmp_path):
    found = SampleStore.open(tmp_path / "samples.sqlite")
    yield found
    found.close()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


def lines(first, last):
    return "".join(f"{second},{second},{second % 2}\n" for second in range(first, last))


def firsts(store):
    """First input column of each stored sample."""
    return [x[0].tolist() for x in inputs_of(store)]


OPTIONS = SeriesOptions(columns="a", time="t", gap="2", window=3, step=3, label="b")


def test_a_file_that_grows_gives_the_windows_of_the_whole_file(store, folder):
    path = folder / "log.csv"
    path.write_text("t,a,b\n" + lines(0, 4))
    Looking(store, folder, options=OPTIONS).scan(3)
    assert firsts(store) == [[0, 1, 2]]
    with path.open("a") as file:
        file.write(lines(4, 8))
    looking = Looking(store, folder, options=OPTIONS)  # the agent was restarted
    looking.scan(3)
    assert firsts(store) == [[0, 1, 2], [3, 4, 5]]
    with path.open("a") as file:
        file.write(lines(11, 15) + "rubbish,1,0\n15,15,1\n" + lines(16, 18) + "18\n" + lines(19, 22))
    looking.scan(4)
    assert firsts(store)[2:] == [[11, 12, 13], [15, 16, 17], [19, 20, 21]]
    assert [row[0] for row in kept(store)] == [0, 1, 1, 1, 1]  # the label of the last row
    assert refused(store) == {"not-numbers": 1, "shape": 1}
    (folder / "other.csv").write_text("t,a,b\n" + lines(22, 24))
    looking.scan(3)
    assert len(kept(store)) == 5  # a window never has rows of two files


def test_windows_of_a_block_stay_on_one_side(store, folder):
    (folder / "log.csv").write_text("t,a,b\n" + lines(0, 100))
    overlapping = SeriesOptions(columns="a", time="t", gap="2", window=4, block=20)
    Looking(store, folder, options=overlapping).scan(3)
    rows = store._connection.execute("SELECT for_test, for_validation FROM sample ORDER BY number").fetchall()
    assert len(rows) == 5 * 17
    assert [len(set(rows[first : first + 17])) for first in range(0, 85, 17)] == [1] * 5
    assert len(set(rows)) == 5
    (folder / "other.csv").write_text("t,a,b\n" + lines(200, 220))
    Looking(store, folder, options=structs.replace(overlapping, step=4)).scan(3)
    rows = store._connection.execute("SELECT for_test FROM sample WHERE number > 85").fetchall()
    assert len(set(rows)) == len(rows) == 5


def test_a_pattern_columns_and_classes_of_a_watched_folder(store, folder):
    for name in ("a.csv", "b.txt.csv"):
        (folder / name).write_text("when;\n" if name == "b.csv" else "a,noise,b\n1,x,worn\n2,y,normal\n,z,\n")
    options = SeriesOptions(columns="a", label="b", classes="normal,worn", missing="gap")
    Looking(store, folder / "a*.csv", options=options).scan(3)
    assert kept(store) == [(1, None), (0, None)]
    assert refused(store) == {}
    Looking(store, folder, options=SeriesOptions(columns="c")).scan(3)
    assert refused(store) == {"file": 1}


ZIGBEE = {"temperature": 21.5, "humidity": 45.2, "linkquality": 120, "occupancy": True}
TASMOTA = {"Time": "2026-05-31T12:00:00", "AM2301": {"Temperature": 21.7, "Humidity": 47.3}, "TempUnit": "C"}
SHELLY = {"id": 0, "output": True, "apower": 8.9, "temperature": {"tC": 23.6, "tF": 74.4}}
SHELLY_EVENT = {"params": {"switch:0": {"apower": 8.9}}}


@pytest.mark.parametrize(
    ("message", "paths", "cells"),
    [
        (ZIGBEE, ["temperature", "$.humidity", "occupancy"], ["21.5", "45.2", "1"]),
        (TASMOTA, ["AM2301.Temperature", "Time"], ["21.7", "2026-05-31T12:00:00"]),
        (SHELLY, ["apower", "temperature.tC", "nothing.here"], ["8.9", "23.6", ""]),
        (SHELLY_EVENT, ["params.switch:0.apower", '$["params"]["switch:0"].apower'], ["8.9", "8.9"]),
        (21.5, ["$"], ["21.5"]),
        ([1, [2, 3]], ["[1][0]", "[0]"], ["2", "1"]),
    ],
)
def test_values_of_real_payloads(message, paths, cells):
    assert cells_of(json.dumps(message).encode(), paths) == cells


def test_messages_without_the_value_and_wrong_paths():
    for content, words in (
        (b'{"battery": 9}', "no value at temperature; it has battery"),
        (b'{"temperature": [1]}', r"a list at temperature; name a number in it, as in temperature\[0\]"),
        (b"{", "not valid JSON"),
        (b'{"temperature": "' + b"0" * 5000 + b'"}', "a long text at temperature"),
        (b"[" * 200_000, "lists"),
    ):
        with pytest.raises(BadSample, match=words):
            cells_of(content, ["temperature"])
    for path in ("a..b", "a[x]", "a[", "$.", 'a["b'):
        with pytest.raises(DataError, match="is no JSON path"):
            path_steps(path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("window=3&gap=5m", "name the values"),
        ("x=a&window=3", "window needs gap too"),
        ("x=a..b", "is no JSON path"),
        ("x=a&label=a", "is the label and also an input"),
        ("x=a&names=b", "names is for files"),
        ("x=a&window=70000&gap=1", "smaller window"),
        ("x=a&windw=3", "windw"),
    ],
)
def test_a_mistake_in_the_options_of_a_topic_is_one_line(options, words):
    with pytest.raises(DataError, match=words) as caught:
        sensor_topic(f"mqtt://user:secret@host/zigbee2mqtt/+?{options}")
    assert "secret" not in str(caught.value)


def options_of(text):
    return sensor_topic(f"mqtt://host/plant/+?{text}").options


def message(number, value, topic="plant/a", *, again=False, retained=False, arrived=0.0):
    content = json.dumps(value).encode()
    return _Message(number, 1, content, topic, again, retained, arrived)


TIMED = "x=v&time=t&gap=2s&window=3&step=3"


def values(*times):
    return [message(number, {"t": time, "v": time}) for number, time in enumerate(times, 1)]


def test_messages_survive_a_restart_and_come_once(tmp_path):
    options, path = options_of(TIMED), tmp_path / "samples.sqlite"
    for number in range(7):  # the agent is killed after every message
        store = SampleStore.open(path)
        MessageSeries(store, options).store([message(number, {"t": number, "v": number})])
        again = message(number, {"t": number, "v": number}, again=True)
        MessageSeries(store, options).store([again])  # it was stored, but not acknowledged
        store._connection.close()
    store = SampleStore.open(path)
    assert firsts(store) == [[0, 1, 2], [3, 4, 5]]
    MessageSeries(store, options).store(values(10, 11, 12))
    assert firsts(store)[2:] == [[10, 11, 12]]  # the 6 is on the other side of a gap
    assert refused(store) == {}
    store.close()


def test_messages_without_a_time_count_by_arrival_and_a_repeated_one_once(store):
    series = MessageSeries(store, options_of("value=$&gap=5m&window=3&step=3"))
    series.store([message(1, 21.5, arrived=0), message(2, 21.5, arrived=60)])
    series.store([message(2, 21.5, again=True, arrived=90), message(3, 22, again=True, arrived=100)])
    assert firsts(store) == [[21.5, 21.5, 22]]  # the third was not stored before
    series.store([message(4, 20, arrived=160), message(5, 30, retained=True, arrived=170)])
    series.store([message(6, 1, arrived=1000), message(7, 2, arrived=1060), message(8, 3, arrived=1100)])
    assert firsts(store)[1:] == [[1, 2, 3]]


def test_late_and_double_messages_and_topics_side_by_side(store):
    series = MessageSeries(store, options_of(TIMED))
    series.store(values(0, 2, 2, 1))
    series.store([message(9, {"t": 1, "v": 50}, "plant/b")])
    assert firsts(store) == [[0, 1, 2]]
    series.store(values(3, 4, 0, 5))
    assert firsts(store)[1:] == [[3, 4, 5]]
    assert refused(store) == {"late": 1}
    by_device = MessageSeries(store, options_of(f"{TIMED}&group=device"))
    for time in range(3):
        by_device.store(
            [message(time, {"t": time, "v": time + 10 * one, "device": str(one)}) for one in (7, 8)]
        )
    assert firsts(store)[2:] == [[70, 71, 72], [80, 81, 82]]


def test_a_full_disk_loses_no_message_and_doubles_none(store, monkeypatch):
    series, add = MessageSeries(store, options_of(TIMED)), SampleStore.add
    series.store(values(0, 1))
    monkeypatch.setattr(SampleStore, "add", lambda *_, **__: (_ for _ in ()).throw(StoreError("no room")))
    for _ in range(3):
        with pytest.raises(StoreError):
            series.store(values(2, 3))
    monkeypatch.setattr(SampleStore, "add", add)
    series.store(values(2, 3))
    assert firsts(store) == [[0, 1, 2]]


def test_labels_and_rows_without_windows(store):
    series = MessageSeries(store, options_of("x=a.x,a.y&label=state&classes=off,on"))
    series.store([message(1, {"a": {"x": 1, "y": 2}, "state": "on"}), message(2, {"a": {"x": 3, "y": 4}})])
    series.store(
        [message(3, {"a": {"x": 1, "y": "many"}}), message(4, {"a": {"x": 1}}), message(5, {"b": 1})]
    )
    assert sorted(kept(store)) == [(-1, None), (1, None)]
    assert [x.tolist() for x in inputs_of(store)] == [[1, 2], [3, 4]]
    assert refused(store) == {"not-numbers": 2, "message": 1}


def test_rows_that_wait_are_bounded_and_deleted_with_samples(store, monkeypatch):
    monkeypatch.setattr(series_states, "MAX_BYTES", 4000)
    series = MessageSeries(store, options_of(TIMED))
    for number in range(200):
        series.store([message(number, {"t": 1, "v": 1}, f"plant/{number}")])
    ours = "SELECT count(*), sum(length(data)) FROM value WHERE name LIKE 'series %'"
    count, num_bytes = store._connection.execute(ours).fetchone()
    assert 0 < count < 80
    assert num_bytes < 8000
    assert store.series_state("received") is not None
    store.delete(SampleFilter(names=("nobody",)))
    assert store._connection.execute(ours).fetchone()[0] == 0


def test_other_options_begin_new_windows(store):
    MessageSeries(store, options_of(TIMED)).store(values(0, 1))
    MessageSeries(store, options_of(TIMED.replace("window=3", "window=2"))).store(values(2, 3))
    assert firsts(store) == [[2, 3]]


def tried(data, *more):
    return CliRunner().invoke(cli.app, ["try", "--data", data, *more])


def test_try_shows_samples_statistics_and_what_is_refused(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "a.csv").write_text("timestamp,a,b\n" + lines(0, 60) + "60,bad,0\n")
    shown = tried("watch:.?columns=a,b&time=timestamp&gap=2&window=3&step=3")
    assert shown.exit_code == 0
    for words in ("20 samples of 2 x 3 (float32)", "no labels", "29.5", "refused, not-numbers: 1", "'bad'"):
        assert words in shown.output
    found = json.loads(tried("watch:.?label=b&columns=timestamp", "--json").output)
    assert (found["num_samples"], found["shape"], found["stream"]) == (61, [1], True)
    assert found["labels"] == "classes 0: 31, 1: 30"
    assert found["first"][1] == {"x": [1.0], "y": 1}
    assert "time=timestamp" in found["hints"][0]
    found = json.loads(tried("csv:a.csv?columns=b", "--json").output)
    assert (found["num_samples"], found["columns"][0]["name"]) == (61, "b")
    assert found["train"] + found["test"] == 61
    refused_file = tried("watch:.?columns=c")
    assert refused_file.exit_code == 1
    assert "there is no column 'c'; the columns are timestamp, a, b" in refused_file.output
    wrong = tried("csv:a.csv")
    assert (wrong.exit_code, len(wrong.output.splitlines())) == (2, 1)
    assert "row 62, column a: 'bad'" in wrong.output
    assert [*folder.iterdir()] == [folder / "a.csv"]


def test_doctor_fails_where_run_would(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "a.csv").write_text("t,a\n1,2\n2,x\n")

    def data_checks(data):
        shown = CliRunner().invoke(cli.app, ["doctor", "--data", data, "--json"])
        found = json.loads(shown.output)["results"]
        return [one["verdict"] for one in found if one["what"] in ("data", "first file")]

    assert data_checks("csv:a.csv?columns=b") == ["fail"]
    assert data_checks("csv:a.csv") == ["fail"]
    assert data_checks("watch:.?columns=b") == ["fail", "ok"]
    assert data_checks("watch:.") == ["ok", "warn", "ok"]
    assert data_checks("watch:.?window=x") == ["fail"]
    assert data_checks("mqtt://host/a?window=3") == ["fail"]


def test_try_reads_no_more_than_it_shows(folder):
    for number in range(50):
        np.savez(folder / f"{number:02}.npz", x=np.random.default_rng(number).normal(size=(20, 2)))
    found = json.loads(tried(f"watch:{folder}", "--json").output)
    assert 100 <= found["num_samples"] < 200
