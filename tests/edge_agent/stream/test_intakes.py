"""What brings samples into the store: a watched folder, a user's iterator, an MQTT topic, a command."""

import json
import logging
import os
import threading
import time
import tracemalloc
import wave

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from fleetune.edge_agent import cli
from fleetune.edge_agent.datasets.log_mel import LogMel, log_mel
from fleetune.edge_agent.stream.intakes import generator, sample_files
from fleetune.edge_agent.stream.intakes.generator import GeneratorIntake
from fleetune.edge_agent.stream.intakes.library_call import Intake
from fleetune.edge_agent.stream.intakes.messages import MAX_MESSAGE_BYTES, read_message
from fleetune.edge_agent.stream.intakes.watched_folder import LAST_LINE_S, SETTLED_S, WatchedFolder
from fleetune.edge_agent.stream.retention import RetentionLimits
from fleetune.edge_agent.stream.sample_store import SampleStore
from fleetune.edge_agent.stream.sample_stream import StreamSettings, is_stream, open_stream
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


class Ticks:
    """A clock that moves when told."""

    now = 0.0

    def __call__(self):
        return self.now


class Looking:
    """A folder that is looked at as if time passed."""

    def __init__(self, store, folder, **options):
        self.clock, self.store = Ticks(), store
        self.folder = WatchedFolder(store, folder, clock=self.clock, **options)

    def scan(self, times=2, pause_s=SETTLED_S):
        for _ in range(times):
            self.folder.scan()
            self.clock.now += pause_s


def kept(store):
    """Class and name of what is kept, in its order."""
    return store._connection.execute("SELECT class, name FROM sample ORDER BY number").fetchall()


def inputs_of(store):
    tables = "input JOIN sample USING (number) JOIN form ON form.number = form"
    rows = store._connection.execute(f"SELECT dtype, shape, x FROM {tables} ORDER BY sample.number")
    return [np.frombuffer(x, dtype).reshape([int(one) for one in shape.split()]) for dtype, shape, x in rows]


def refused(store):
    store.save_counts()
    return dict(store._connection.execute("SELECT kind, count FROM refusal"))


def image(path, value, mode="L", size=(6, 5)):
    pillow = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    path.parent.mkdir(exist_ok=True)
    pillow.new(mode, size, value).save(path)


def test_images_of_class_folders_and_labels_by_moving_a_file(store, folder):
    (folder / "classes.txt").write_text("cat\ndog\n")
    image(folder / "dog" / "a.png", 3)
    image(folder / "7" / "b.png", (1, 2, 3), "RGB")
    image(folder / "c.png", 4)
    image(folder / "cow" / "d.png", 5)
    (folder / "cat").mkdir()
    (folder / "cat" / "e.jpg").write_bytes(b"no image at all")
    looking = Looking(store, folder)
    looking.scan(1)
    assert kept(store) == []  # they may still be written
    looking.scan(4)
    assert sorted(kept(store)) == [(-1, "c.png"), (1, "dog/a.png"), (7, "7/b.png")]
    assert sorted(x.shape for x in inputs_of(store)) == [(5, 6), (5, 6), (5, 6, 3)]
    assert refused(store) == {"file": 2}  # once each, however often it is looked at
    (folder / "c.png").rename(folder / "cat" / "c.png")
    looking.scan(3)
    assert sorted(kept(store)) == [(0, "cat/c.png"), (1, "dog/a.png"), (7, "7/b.png")]
    (folder / "classes.txt").write_text("cat\ndog\ncow\n")
    os.utime(folder / "cow" / "d.png", ns=(1, 1))  # or written anew
    looking.scan(3)
    assert (2, "cow/d.png") in kept(store)


def test_sounds_of_class_folders_are_kept_as_features(store, folder):
    sound = (20_000 * np.sin(np.arange(1200) / 4)).astype("<i2")
    for name, rate in (("1/a.wav", 8000), ("b.wav", 8000), ("1/c.wav", 16000)):
        (folder / name).parent.mkdir(exist_ok=True)
        with wave.open(str(folder / name), "wb") as file:
            file.setparams((1, 2, rate, 0, "NONE", ""))
            file.writeframes(sound.tobytes() * (2 if name == "b.wav" else 1))
    settings = LogMel(rate=8000, seconds=0.2, mels=8)
    looking = Looking(store, folder, sounds=settings)
    looking.scan(4)
    assert sorted(kept(store)) == [(-1, "b.wav"), (1, "1/a.wav")]
    features = [log_mel(np.tile(sound, times) / np.float32(2**15), settings) for times in (1, 2)]
    assert sorted(x.tobytes() for x in inputs_of(store)) == sorted(one.tobytes() for one in features)
    assert refused(store) == {"file": 1}  # of another rate


def test_sounds_that_are_no_wav_files_are_one_warning_with_the_command_that_converts_them(
    store, folder, caplog
):
    for name in ("a.flac", "b.OGG", "c.mp3", ".d.mp3"):
        (folder / name).write_bytes(b"sound")
    Looking(store, folder, sounds=LogMel(rate=8000)).scan(3)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(folder / "a.flac") in record.getMessage()
    assert "ffmpeg -i FILE -ar 8000 -c:a pcm_s16le FILE.wav" in record.getMessage()
    assert (kept(store), refused(store)) == ([], {})


def test_a_file_that_grows_is_left_until_it_is_whole(store, folder):
    looking, path = Looking(store, folder), folder / "shard.npz"
    np.savez(folder / "whole.npz", x=np.eye(3, dtype=np.float32), y=[0, 1, 2], id=["a", "b", "c"])
    content = (folder / "whole.npz").read_bytes()
    (folder / "whole.npz").rename(path)
    for end in range(0, len(content), len(content) // 4):
        path.write_bytes(content[:end])
        os.utime(path, ns=(end, end))
        looking.scan(1, 10.0)
    assert kept(store) == []
    path.write_bytes(content)
    looking.scan(3)
    assert kept(store) == [(0, "a"), (1, "b"), (2, "c")]
    assert refused(store) == {}


def test_shards_that_are_not_what_they_should_be_cost_a_line_each(store, folder, caplog):
    x = np.eye(3, dtype=np.float32)
    np.savez(folder / "marks.npz", x=x, y=[0, 1, 2], test=[True, False, False])
    np.savez(folder / "short.npz", x=x, y=[0, 1])
    np.savez(folder / "none.npz", y=[0, 1])
    (folder / "broken.npz").write_bytes(b"PK\x03\x04 and no more")
    np.savez(folder / "some.npz", x=np.array([[1.0, 2.0], [np.nan, 0.0], [3.0, 4.0]]), y=[0, 1, -4])
    (folder / ".hidden.npz").write_bytes(b"x")
    (folder / "new.npz.tmp").write_bytes(b"x")
    (folder / "readme.txt").write_text("not a sample")
    looking = Looking(store, folder)
    looking.scan(6)
    assert kept(store) == [(0, None)]
    assert refused(store) == {"file": 4, "not-finite": 1, "label": 1}
    assert len([one for one in caplog.records if one.levelno >= logging.WARNING]) == 3
    looking = Looking(store, folder)  # after a restart too
    looking.scan(3)
    assert refused(store)["file"] == 4


def test_a_shard_without_x_is_refused_with_the_names_that_it_has(store, folder, caplog):
    np.savez(folder / "named.npz", images=np.eye(3, dtype=np.float32), labels=[0, 1, 2])
    Looking(store, folder).scan(3)
    assert (
        "named.npz: there is no array x in it; it holds images, labels: save x, and optionally y and id"
        in caplog.text
    )


def test_rows_of_a_table_that_grows(store, folder):
    path, looking = folder / "log.csv", Looking(store, folder, labels=("kind",))
    path.write_text("temperature,kind,id,speed\n1.5,0,a,2\n2.5,,b,3\nbad,0,c,4\n")
    looking.scan()
    assert kept(store) == [(0, "a"), (-1, "b")]
    with path.open("a") as file:
        file.write("3.5,1,d,5\n4.5,1")
    looking.scan(3)
    assert kept(store)[2:] == [(1, "d")]  # the last line may go on
    with path.open("a") as file:
        file.write(",e,6")
    looking.scan(2)
    assert len(kept(store)) == 3
    looking.scan(2, LAST_LINE_S)
    assert kept(store)[3:] == [(1, "e")]
    assert [x.tolist() for x in inputs_of(store)] == [[1.5, 2], [2.5, 3], [3.5, 5], [4.5, 6]]
    (folder / "other.csv").write_text("speed,temperature,kind\n7,8,1\n")  # by name, not by place
    (folder / "third.csv").write_text("speed,pressure,kind\n7,8,1\n")
    looking.scan(3)
    assert inputs_of(store)[4].tolist() == [8, 7]
    assert refused(store) == {"not-numbers": 1, "file": 1}
    path.write_text("temperature,kind,id,speed\n9,0,f,9\n")  # begun anew
    looking.scan(3)
    assert kept(store)[5:] == [(0, "f")]
    path.unlink()
    looking.scan(2)
    assert store.file_progress(str(path)) is None


def test_several_columns_are_a_label_of_numbers(store, folder):
    (folder / "two.csv").write_text("x,u,v\n1,0.5,2\n2,,3\n")
    Looking(store, folder, labels=("u", "v")).scan()
    assert [row[0] for row in kept(store)] == [-2, -1]
    (y,) = [y for (y,) in store._connection.execute("SELECT y FROM sample WHERE y IS NOT NULL")]
    assert np.frombuffer(y, "<f4").tolist() == [0.5, 2]


def test_what_needs_a_package_says_so_once_and_is_taken_when_it_is_there(store, folder, caplog, monkeypatch):
    image(folder / "1" / "a.png", 9)
    looking = Looking(store, folder)
    monkeypatch.setattr(sample_files, "find_spec", lambda _: None)
    looking.scan(5)
    assert len(caplog.records) == 1
    assert "Pillow" in caplog.text
    monkeypatch.undo()
    looking.scan(1)
    assert kept(store) == [(1, "1/a.png")]


def test_a_full_disk_leaves_files_for_another_time(store, folder, monkeypatch):
    np.savez(folder / "a.npz", x=np.eye(3, dtype=np.float32), y=[0, 1, 2])
    looking = Looking(store, folder)
    looking.scan(1)
    add = SampleStore.add

    def fails(*_, **__):
        raise StoreError("no room")

    monkeypatch.setattr(SampleStore, "add", fails)
    for _ in range(3):
        with pytest.raises(StoreError):
            looking.scan(1)
        looking.clock.now += SETTLED_S
    monkeypatch.setattr(SampleStore, "add", add)
    looking.scan(1)
    assert len(kept(store)) == 3


def fed(count):
    for index in range(count):
        yield np.full(3, index, np.float32), index % 2, f"n{index}"
    yield {"x": [1.0, float("nan"), 2.0]}
    yield {"x": [5.0, 6.0, 7.0], "y": 1}
    yield np.full(3, -1.0)
    yield (1, 2, 3, 4)


def until(condition):
    give_up_at = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def running(feeder):
    """A feeder in a thread; call what is returned to end it."""
    stopped = threading.Event()
    thread = threading.Thread(target=feeder.run, args=(stopped,))
    thread.start()

    def end():
        stopped.set()
        thread.join(60)
        assert not thread.is_alive()

    return end


def test_an_iterators_samples_are_kept_as_they_come(store):
    end = running(GeneratorIntake(store, lambda: fed(700), "me:fed"))
    until(lambda: len(kept(store)) == 702)
    end()
    assert kept(store)[:2] == [(0, "n0"), (1, "n1")]
    assert kept(store)[-2:] == [(1, None), (-1, None)]
    assert refused(store) == {"not-finite": 1, "not-numbers": 1}


def test_an_iterator_that_fails_is_called_again_and_one_that_waits_holds_nobody_up(store, monkeypatch):
    monkeypatch.setattr(generator, "FIRST_PAUSE_S", 0.01)
    calls, waits = [], threading.Event()

    def sensor():
        calls.append(1)
        yield [float(len(calls))], 0
        if len(calls) < 3:
            raise RuntimeError("the cable\nis out")
        waits.wait(60)

    end = running(GeneratorIntake(store, sensor, "me:sensor"))
    until(lambda: len(kept(store)) == 3)
    end()  # though it still waits for its sensor
    waits.set()
    assert refused(store) == {"iterator": 2}


def test_a_message_is_a_sample_or_a_label():
    x = np.arange(6, dtype="<f4").reshape(2, 3)
    sample = read_message(
        msgspec.msgpack.encode({"x": x.tobytes(), "dtype": "f4", "shape": [2, 3], "y": [0.5, 1.5], "id": 7}),
        as_json=False,
    ).sample
    assert np.array_equal(sample.x, x)
    assert (sample.name, sample.label.y.tolist()) == ("7", [0.5, 1.5])
    label = read_message(b'{"id": "a", "y": 1}', as_json=True)
    assert (label.id, label.label.class_number, label.sample) == ("a", 1, None)
    assert read_message(b'{"x": [1, 2], "dtype": "u1"}', as_json=True).sample.x.dtype == np.uint8


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ({"x": [3, "many"]}, "not-numbers"),
        ({"y": 1}, "message"),
        ({"id": "a"}, "message"),
        ({"x": b"123", "dtype": "f4", "shape": [2, 3]}, "message"),
        ({"x": b"123", "dtype": "f4", "shape": [2**40, 2**40]}, "message"),
        ({"x": [1.0], "z": 1}, "message"),
        ([1, 2], "message"),
    ],
)
def test_a_bad_message_is_a_counted_problem(message, kind):
    assert read_message(msgspec.msgpack.encode(message), as_json=False).problem.kind == kind


@pytest.mark.parametrize("content", [b"{rubbish", b'{"x": ' + b"[" * 200_000, b"GET / HTTP/1.1"])
def test_rubbish_is_a_counted_problem(content):
    for as_json in (True, False):
        assert read_message(content, as_json=as_json).problem.kind == "message"


@pytest.mark.parametrize("field", ["x", "y"])
@pytest.mark.parametrize("as_json", [True, False], ids=["json", "messagepack"])
@pytest.mark.parametrize("element", [[], 1.5, {}], ids=["lists", "numbers", "maps"])
def test_a_message_takes_bounded_memory(element, as_json, field):
    """A message of 4 MB that is all empty lists took 137 MB as JSON, and 419 MB as MessagePack."""
    encode = (msgspec.json if as_json else msgspec.msgpack).encode
    one = len(encode([element, element])) - len(encode([element]))
    data = encode({"id": 1, field: [element] * ((MAX_MESSAGE_BYTES - 100) // one)})
    tracemalloc.start()
    try:
        read = read_message(data, as_json=as_json)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * 2**20
    assert (read.problem is None) == (element == 1.5 and as_json and field == "x")


def test_large_inputs_come_as_bytes():
    x = np.arange(10**6, dtype="<f4")
    data = msgspec.msgpack.encode({"x": x.tobytes(), "dtype": "f4", "shape": [1000, 1000], "y": [0.5] * 1000})
    assert np.array_equal(read_message(data, as_json=False).sample.x, x.reshape(1000, 1000))
    lists = msgspec.msgpack.encode({"x": x.tolist()[:100_000]})
    assert "send x as bytes" in str(read_message(lists, as_json=False).problem)


def test_which_sources_are_streams(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_streams.py").write_text(
        "def grows(rate=1):\n    yield [float(rate)], 1\n\n\ndef whole():\n    return [], []\n"
    )
    assert is_stream("watch:in")
    assert is_stream("intake:")
    assert is_stream("mine_streams:grows")
    assert next(generator.find_generator("mine_streams:grows?rate=7")()) == ([7.0], 1)
    with pytest.raises(DataError, match="'speed'; grows takes rate"):
        is_stream("mine_streams:grows?speed=7")
    assert not is_stream("mine_streams:whole")
    assert not is_stream("npz:x.npz")
    assert not is_stream("digits")
    with pytest.raises(DataError, match=r"there is no folder .*/in; create it"):
        open_stream(tmp_path / "s.sqlite", "watch:in", StreamSettings())


def test_a_table_whose_numbers_become_one_float32_is_refused_as_a_file(store, folder, caplog):
    (folder / "ids.csv").write_text("id_of_row,t\n16777216,1\n16777217,2\n16777218,3\n")
    (folder / "twice.csv").write_text("t,t\n1,2\n")
    looking = Looking(store, folder)
    looking.scan(3)
    assert refused(store) == {"file": 2}
    assert "column id_of_row: '16777217' and 16777216 become one number as float32" in caplog.text
    looking.scan(3)  # no second try while it stands as it was
    assert refused(store) == {"file": 2}


def test_a_bad_cell_is_told_with_its_file_and_column(store, folder, caplog):
    (folder / "log.csv").write_text("t,speed\n1,fast\n2,nan\n")
    Looking(store, folder).scan(3)
    assert refused(store) == {"not-numbers": 1, "not-finite": 1}
    assert f"{folder}/log.csv: column speed: 'fast' is no number; correct it" in caplog.text
    assert f"{folder}/log.csv: column speed: 'nan' is not a finite float32 number" in caplog.text


def test_samples_put_in_by_hand_are_there_and_shown(tmp_path, folder):
    (folder / "a.csv").write_text("p,q,label\n1,2,0\n3,4,1\n1,2,0\nx,1,0\n5,6,\n")
    here = ["--fleet", "f", "--device", "d", "--state", str(tmp_path)]
    found = CliRunner().invoke(cli.app, ["samples", *here])
    assert found.exit_code == 2
    assert "no samples are stored here" in found.output
    found = CliRunner().invoke(cli.app, ["add", str(folder / "a.csv"), *here])
    assert found.output == f"{folder}/a.csv: 3 stored, 1 known, 1 refused (not-numbers)\n"
    lines = '{"x": [7, 8], "y": 1, "id": "h"}\n\n{"id": "h", "y": 0}\nrubbish\n'
    found = CliRunner().invoke(cli.app, ["add", "-", *here], input=lines)
    assert found.output == "-: 1 stored, 1 labelled, 1 refused (message)\n"
    found = CliRunner().invoke(cli.app, ["add", str(folder / "a.txt"), *here])
    assert found.exit_code == 2
    found = CliRunner().invoke(cli.app, ["samples", *here, "--json"])
    told = json.loads(found.output)
    assert {row["name"]: row["train"] + row["test"] for row in told["classes"]} == {
        "no label yet": 1,
        "0": 2,
        "1": 1,
    }
    assert told["shapes"] == {"f4 (2)": 4}
    assert told["new"] == 4
    assert told["drift"] is None
    assert set(told["refused"]) == {"not-numbers", "message"}
    found = CliRunner().invoke(cli.app, ["samples", *here])
    assert "new since the last training: 4; drift: not known yet" in found.output
    with Intake.open("f", "d", tmp_path, bounds=RetentionLimits(keep_mb=5)) as intake:
        assert intake.add([7.0, 8.0]) == "known"
    found = CliRunner().invoke(cli.app, ["wipe", "--state", str(tmp_path), "--yes"])
    assert found.exit_code == 0  # no agent has run here yet, and it is ours all the same
    assert not (tmp_path / "f").exists()
