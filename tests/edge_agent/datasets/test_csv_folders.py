"""CSV files as loggers and data portals write them: many files, a time, gaps, missing values, one series a
person or engine. The data of others are skipped where they are absent.
"""

import importlib.util
import tracemalloc

import numpy as np
import pytest
from tests.helpers.errors import raises
from tests.helpers.places import ROOT

from fleetune.edge_agent.datasets.sources import load
from fleetune.edge_agent.training.device_data import split
from fleetune.protocols.errors import DataError
from fleetune.protocols.input_files import input_limits


@pytest.fixture
def documented(tmp_path, monkeypatch):
    """A source of docs/data.md, by how it begins, loaded in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "data.md").read_text()

    def loaded(begin, more=""):
        (line,) = [line for line in page.splitlines() if line.startswith(begin)]
        return load(line.split()[0] + more)

    return loaded


@pytest.fixture
def motors(tmp_path):
    """Two classes, three files each, 100 rows a second, with a pause of 5 s in the middle."""
    draw = np.random.default_rng(3)
    for kind in ("normal", "worn"):
        for number in range(3):
            path = tmp_path / "motors" / kind / f"log-{number}.csv"
            path.parent.mkdir(parents=True, exist_ok=True)
            seconds = 3600 * number + np.arange(600) / 100 + np.where(np.arange(600) < 300, 0, 5)
            times = np.datetime64("2026-05-31T12:00:00.000") + (1000 * seconds).astype("timedelta64[ms]")
            rows = draw.normal(size=(600, 3)).astype(np.float32)
            lines = [
                f"{time},{','.join(map(repr, map(float, row)))}"
                for time, row in zip(times, rows, strict=True)
            ]
            path.write_text("timestamp,ax,ay,az\n" + "\n".join(lines) + "\n")
    return tmp_path / "motors"


OPTIONS = "time=timestamp&gap=50ms&window=128&step=64"


def test_motors_as_loggers_write_them(motors, documented):
    found = documented("csv:motors?", "&label=@folder&classes=normal,worn&group=@file")
    assert found.x.shape == (6 * 2 * 3, 3, 128)  # (300 - 128) // 64 + 1 of each half of a file
    assert found.y.tolist() == [0] * 18 + [1] * 18
    assert found.columns == ("ax", "ay", "az")
    assert found.group[[0, 6, 12, 18]].tolist() == ["log-0", "log-1", "log-2", "log-0"]
    assert len(set(found.block.tolist())) == 6
    first = np.loadtxt(motors / "normal" / "log-0.csv", delimiter=",", skiprows=1, usecols=(1, 2, 3))
    np.testing.assert_array_equal(found.x[3], first[300:428].T.astype(np.float32))  # after the pause
    data = split(found, 0.3, 0.0)
    assert {data.size("train"), data.size("test")} <= {6, 12, 18, 24, 30}  # whole files
    (motors / "begun.csv").write_text("")
    (motors / "worn" / "begun.csv").write_text("timestamp,ax,ay,az\n")
    assert len(load(f"csv:{motors}?{OPTIONS}").x) == len(found.x)
    one = load(f"csv:{motors}/*/log-1.csv?{OPTIONS}")
    np.testing.assert_array_equal(one.x, found.x[[*range(6, 12), *range(24, 30)]])


def test_mistakes_with_folders_are_one_line(motors, tmp_path):
    with raises(DataError, "log-0.csv", "row 2", "column timestamp", "time=timestamp"):
        load(f"csv:{motors}")
    with raises(DataError, "log-0.csv", "'bx'", "timestamp, ax, ay, az"):
        load(f"csv:{motors}?columns=bx")
    with raises(DataError, "window 601", "longer than every file", "600 rows"):
        load(f"csv:{motors}?{OPTIONS.replace('128', '601')}")
    with raises(DataError, "no 301 rows follow each other", "gap"):
        load(f"csv:{motors}?{OPTIONS.replace('128', '301')}")
    with raises(DataError, "nothing", "full path"):
        load(f"csv:{tmp_path}/nothing/*.csv?columns=ax")
    (tmp_path / "empty").mkdir()
    with raises(DataError, "empty", ".csv"):
        load(f"csv:{tmp_path}/empty?columns=ax")
    (motors / "worn" / "other.csv").write_text("timestamp,ax,ay,heat\n2026-05-31T12:00:00,1,2,3\n")
    with raises(DataError, "other.csv", "log-0.csv", "az, heat", "columns="):
        load(f"csv:{motors}?{OPTIONS}")
    assert load(f"csv:{motors}?{OPTIONS}&columns=ax,ay").x.shape[1] == 2
    (motors / "worn" / "other.csv").write_text("timestamp,ax,ay,az\n2026-05-31T12:00:00,1,loose,3\n")
    with raises(DataError, "other.csv", "row 2", "column ay", "'loose'"):
        load(f"csv:{motors}?{OPTIONS}")


def test_a_folder_whose_samples_do_not_fit_into_memory_is_refused(motors):
    with input_limits(memory_bytes=2**20), raises(DataError, "524.3 kB", "larger step", "watch:"):
        load(f"csv:{motors}?time=timestamp&gap=50ms&window=128")


@pytest.mark.nightly
def test_files_are_read_one_after_the_other(tmp_path):
    """10 files of 1 MB give few windows; the memory is that of one file."""
    for number in range(10):
        lines = "".join(f"{row},{row % 7},{row % 5}\n" for row in range(80_000))
        (tmp_path / f"{number:02}.csv").write_text("t,a,b\n" + lines)
    size = (tmp_path / "00.csv").stat().st_size
    tracemalloc.start()
    try:
        found = load(f"csv:{tmp_path}?time=t&gap=1&window=100&step=1000")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.x.shape == (10 * 80, 2, 100)
    assert peak <= 6e6 + 8 * size + 4 * found.x.nbytes


def test_missing_values_by_each_rule(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("t,a,b\n1,1,1\n2,NA,2\n3,3,\n4,4,4\n5,5,5\n")
    with raises(DataError, "row 3", "column a", "'NA'", "missing=gap"):
        load(f"csv:{path}")
    assert load(f"csv:{path}?missing=gap").x[:, 0].tolist() == [1, 4, 5]
    assert load(f"csv:{path}?missing=gap&label=b&columns=t").y.tolist() == [1, 2, 4, 5]
    series = f"csv:{path}?time=t&gap=1&window=2"
    assert load(f"{series}&missing=gap").x.tolist() == [[[4, 5], [4, 5]]]
    held = load(f"{series}&missing=hold").x
    assert held[:, 0].tolist() == [[1, 1], [1, 3], [3, 4], [4, 5]]
    assert held[:, 1].tolist() == [[1, 2], [2, 2], [2, 4], [4, 5]]
    path.write_text("a\nNA\n")
    with raises(DataError, "every row has an empty cell", "columns="):
        load(f"csv:{path}?missing=gap")


def loaders(data_folder, name):
    if not (data_folder / "sensors" / name).exists():
        pytest.skip(f"no {data_folder}/sensors/{name}")
    spec = importlib.util.spec_from_file_location("shared_loaders", data_folder / "loaders.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(path, names, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [",".join("NA" if one != one else repr(float(one)) for one in row) for row in rows]  # noqa: PLR0124
    path.write_text(",".join(names) + "\n" + "\n".join(lines) + "\n")


def test_hourly_weather_with_gaps(data_folder, tmp_path, documented):
    """The Beijing stations as they are published: the time in four columns, NA where a value is missing."""
    x, features, stations, time = loaders(data_folder, "beijing_air_12_stations.npz").beijing_air()
    hours, names = 2000, [str(one) for one in features]
    for place in range(3):
        rows = np.concatenate([time[:hours], x[place, :hours]], axis=1)
        write(tmp_path / "beijing" / f"{stations[place]}.csv", ["year", "month", "day", "hour", *names], rows)
    found = documented("csv:beijing?", "&group=@file")
    used, known = [names.index("PM2.5"), names.index("TEMP")], {}
    for place in range(3):
        both = np.ascontiguousarray(x[place, :hours][:, used].T)
        for first in range(hours - 29):
            past, future = both[:, first : first + 24], both[0, first + 24 : first + 30]
            if np.isfinite(both[:, first : first + 30]).all():
                known[stations[place], past.tobytes()] = future.tolist()
    made = {
        (name, one.tobytes()): y.tolist() for name, one, y in zip(found.group, found.x, found.y, strict=True)
    }
    assert made.items() <= known.items()
    assert 0 < len(known) - len(made) <= 29 * 3 * (hours // 300)  # the ends of blocks cut the others


def test_phone_sensors_by_user(data_folder, tmp_path, documented):
    x, y, user = loaders(data_folder, "wisdm_v1.1_windows.npz").wisdm()
    names = [f"f{place}" for place in range(x.shape[1])]
    for one in (1, 2, 3):
        rows = np.column_stack([y[user == one], x[user == one]])
        write(tmp_path / "phones" / f"user-{one}.csv", ["activity", *names], rows)
    found = documented("csv:phones?")
    kept = np.isin(user, (1, 2, 3)) & ~np.isnan(x).any(axis=1)
    assert kept.sum() > 0
    assert found.y.tolist() == np.concatenate([y[kept & (user == one)] for one in (1, 2, 3)]).tolist()
    assert found.group[0] == "user-1"
    assert found.input_shape == (43,)


def test_engines_and_their_remaining_life(data_folder, tmp_path, documented):
    train, _, _ = loaders(data_folder, "cmapss_fd001.npz").cmapss()
    rows = train[train[:, 0] <= 10]
    lengths = [int((rows[:, 0] == engine).sum()) for engine in range(1, 11)]
    life = np.array([lengths[int(engine) - 1] - cycle for engine, cycle in rows[:, :2]])
    names = ["engine", "cycle", *(f"s{place}" for place in range(24)), "life"]
    write(tmp_path / "engines.csv", names, np.column_stack([rows, life]))
    found = documented("csv:engines.csv?")
    assert found.input_shape == (24, 30)
    assert max(lengths) <= 300  # each run is one block
    assert len(found.x) == sum((length - 30) // 5 + 1 for length in lengths)
    assert found.y[0] == lengths[0] - 30
    assert len(set(found.block.tolist())) == 10
    parts = split(found, 0.3, 0.0)
    assert parts.size("train") + parts.size("test") == len(found.x)
