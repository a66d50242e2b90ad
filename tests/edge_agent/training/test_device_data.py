"""A device's data: every format it comes in, and what each damaged or foreign file gets."""

import gzip
import io
import pickle
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tests.helpers.errors import raises

from fleetune.edge_agent.datasets import sources
from fleetune.edge_agent.datasets.har import CHANNELS
from fleetune.edge_agent.datasets.npz import from_arrays
from fleetune.edge_agent.training.device_data import (
    Dataset,
    DeviceData,
    apportion,
    check_fits,
    load,
    save_npz,
    scaled,
    split,
    stratified,
    take,
)
from fleetune.protocols.errors import DataError, SettingError, StoreError
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.task import TaskSection
from fleetune.protocols.tasks import CLASSIFICATION, task_of

KEY = Key.of("test", "data")


def spec(shape, classes=10):
    return ModelSpec("model", (), (), shape, classes)


def images(n, *shape):
    return KEY.generator().integers(256, size=(n, *shape), dtype=np.uint8)


def idx_bytes(array):
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_idx(folder, prefix="", test="t10k", *, compress=True, train=12, num_test=5):
    folder.mkdir(parents=True, exist_ok=True)
    for name, n in (("train", train), (test, num_test)):
        for kind, array in (
            ("images-idx3", images(n, 6, 7)),
            ("labels-idx1", np.arange(n, dtype=np.uint8) % 10),
        ):
            data = idx_bytes(array)
            path = folder / f"{prefix}{name}-{kind}-ubyte{'.gz' if compress else ''}"
            path.write_bytes(gzip.compress(data) if compress else data)


class Python2Pickler(pickle._Pickler):
    """Writes strings and bytes as Python 2 did, which is how the original CIFAR files were made."""

    dispatch = pickle._Pickler.dispatch.copy()

    def save_string(self, value):
        value = value.encode() if isinstance(value, str) else value
        self.write(b"T" + struct.pack("<I", len(value)) + value)

    dispatch[bytes] = dispatch[str] = save_string


def pickled(content, python2):
    if not python2:
        return pickle.dumps(content, protocol=4)
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(content)
    return file.getvalue().replace(b"numpy._core", b"numpy.core")


def write_cifar(folder, hundred=False, binary=False, python2=True):
    folder.mkdir(exist_ok=True)
    names = ["train", "test"] if hundred else [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    x = images(len(names) * 4, 3, 32, 32)
    y = np.arange(len(x)) * 3 % (100 if hundred else 10)
    for i, name in enumerate(names):
        rows, labels = x[4 * i : 4 * i + 4].reshape(4, -1), y[4 * i : 4 * i + 4]
        if binary:
            columns = [labels[:, None] // 5, labels[:, None], rows] if hundred else [labels[:, None], rows]
            (folder / f"{name}.bin").write_bytes(np.concatenate(columns, 1).astype(np.uint8).tobytes())
        else:
            key = "fine_labels" if hundred else "labels"
            (folder / name).write_bytes(pickled({"data": rows, key: labels.tolist()}, python2))
    return x, y


def one_line(source, match, folder=None):
    with pytest.raises(DataError, match=match) as caught:
        load(source, folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# sources


def test_digits():
    pytest.importorskip("sklearn")
    digits = load("digits")
    assert digits.x.shape == (1797, 1, 8, 8)
    assert (digits.x.dtype, digits.x.min(), digits.x.max()) == (np.float32, 0, 1)
    assert (digits.y.max() + 1, digits.input_shape, digits.test) == (10, (1, 8, 8), None)


def test_digits_are_scikit_learns_wherever_it_has_them(tmp_path, monkeypatch):
    bunch = pytest.importorskip("sklearn.datasets").load_digits()
    wanted = (bunch.images / 16)[:, None].astype(np.float32)
    elsewhere = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    for found in (load("digits"), moved(monkeypatch, elsewhere)):
        assert np.array_equal(found.x, wanted)
        assert np.array_equal(found.y, bunch.target)


def moved(monkeypatch, spec):
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda _: spec)
    return load("digits")


def test_digits_are_read_without_importing_scikit_learn():
    asked = "import sys; from fleetune.edge_agent.datasets.sources import load; load('digits')"
    subprocess.run([sys.executable, "-c", f"{asked}; assert 'sklearn' not in sys.modules"], check=True)


def test_digits_without_scikit_learn_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    one_line("digits", "pip install scikit-learn")


@pytest.mark.parametrize("compress", [True, False])
def test_idx(tmp_path, compress):
    write_idx(tmp_path / "mnist", compress=compress)
    data = load(f"idx:{tmp_path}/mnist")
    assert data.x.shape == (17, 1, 6, 7)
    assert data.x.dtype == np.uint8
    np.testing.assert_array_equal(data.x[:12, 0], images(12, 6, 7))
    assert data.y.tolist() == [*range(10), 0, 1, *range(5)]
    assert data.test.tolist() == [False] * 12 + [True] * 5


def write_har(folder, sizes=(4, 2), time_steps=5):
    """Windows that count up by 100 a channel; person 3 moves first, then person 7."""
    for part, size in zip(("train", "test"), sizes, strict=True):
        signals = folder / part / "Inertial Signals"
        signals.mkdir(parents=True)
        for channel, name in enumerate(CHANNELS):
            rows = 100 * channel + np.arange(size * time_steps).reshape(size, time_steps)
            np.savetxt(signals / f"{name}_{part}.txt", rows, fmt=" %.7e")
        (folder / part / f"y_{part}.txt").write_text("".join(f"{1 + i % 6}\n" for i in range(size)))
        (folder / part / f"subject_{part}.txt").write_text("3\n" + "7\n" * (size - 1))


def test_har(tmp_path):
    write_har(tmp_path / "UCI HAR Dataset")
    data = load("har:UCI HAR Dataset", tmp_path)
    assert data.x.shape == (6, 9, 5)
    assert data.x.dtype == np.float32
    assert data.x[1, 2].tolist() == [205, 206, 207, 208, 209]
    assert data.x[4, 8, 0] == 800
    assert data.y.tolist() == [0, 1, 2, 3, 0, 1]
    assert data.y.max() + 1 == 4
    assert data.group.tolist() == [3, 7, 7, 7, 3, 7]
    assert data.test.tolist() == [False] * 4 + [True] * 2


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("train/Inertial Signals/body_gyro_y_train.txt", None, "body_gyro_y_train.txt: no such file"),
        (
            "test/Inertial Signals/body_acc_x_test.txt",
            "1 2 x\n",
            "body_acc_x_test.txt: not a table of numbers",
        ),
        ("train/Inertial Signals/body_acc_x_train.txt", "1 2 3 4 5\n", "different numbers of rows"),
        ("test/y_test.txt", "1\n", "different numbers of rows"),
        ("test/subject_test.txt", "1\n1\n1\n", "different numbers of rows"),
        ("test/y_test.txt", "0\n1\n", "an activity is below 1"),
    ],
)
def test_har_damaged(tmp_path, name, content, match):
    write_har(tmp_path / "har")
    (tmp_path / "har" / name).unlink()
    if content is not None:
        (tmp_path / "har" / name).write_text(content)
    one_line(f"har:{tmp_path}/har", match)


def test_idx_by_prefix(tmp_path):
    write_idx(tmp_path / "emnist", "emnist-letters-", "test", train=9)
    write_idx(tmp_path / "emnist", "emnist-digits-", "test", train=7)
    assert len(load("idx:emnist/emnist-digits", tmp_path).y) == 12
    one_line("idx:emnist", "no file train-images-idx", tmp_path)


def test_paths_are_relative_to_here_then_the_folder_then_fleetune_data(tmp_path, monkeypatch):
    for number, place in enumerate(("here", "folder", "data"), start=1):
        write_idx(tmp_path / place / "set", num_test=number)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("FLEETUNE_DATA", str(tmp_path / "data"))
    assert load("idx:set", tmp_path / "folder").test.sum() == 1
    monkeypatch.chdir(tmp_path)
    assert load("idx:set", tmp_path / "folder").test.sum() == 2
    assert load("idx:set").test.sum() == 3
    monkeypatch.delenv("FLEETUNE_DATA")
    assert str(tmp_path) in one_line("idx:set", "there is no set in .*FLEETUNE_DATA")


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda data: gzip.compress(data)[:-20], "cannot be read"),
        (lambda data: b"no gzip at all", "cannot be read"),
        (lambda data: gzip.compress(data)[:30] + b"\0" * 30, "cannot be read"),
        (lambda data: gzip.compress(data[:-1]), "its header says"),
        (lambda data: gzip.compress(data + b"x"), "its header says"),
        (lambda data: gzip.compress(b"\0\0\x08\x03" + b"\xff" * 12), "its header says"),
        (lambda data: gzip.compress(b"\0\0\x08\x03\0"), "its header says"),
        (lambda data: gzip.compress(b"PNG" + data), "not an IDX file"),
        (lambda data: gzip.compress(b""), "not an IDX file"),
        (lambda data: gzip.compress(idx_bytes(images(11, 6, 7))), "do not match labels"),
        (lambda data: gzip.compress(idx_bytes(images(12, 6))), "do not match labels"),
        (lambda data: gzip.compress(idx_bytes(images(12, 6, 8))), "training images are"),
    ],
)
def test_damaged_idx(tmp_path, damage, match):
    write_idx(tmp_path)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(damage(idx_bytes(images(12, 6, 7))))
    one_line(f"idx:{tmp_path}", match)


def test_idx_file_missing(tmp_path):
    write_idx(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    one_line(f"idx:{tmp_path}", "no file t10k-labels or test-labels")


@pytest.mark.parametrize("hundred", [False, True])
@pytest.mark.parametrize(("binary", "python2"), [(True, False), (False, True), (False, False)])
def test_cifar(tmp_path, hundred, binary, python2):
    x, y = write_cifar(tmp_path, hundred, binary, python2)
    data = load(f"cifar:{tmp_path}")
    np.testing.assert_array_equal(data.x, x)
    np.testing.assert_array_equal(data.y, y)
    assert (data.x.dtype, data.test.sum(), data.test[-4:].all()) == (np.uint8, 4, True)


class Evil:
    def __reduce__(self):
        return (Path.touch, (Path("evil"),))


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (pickle.dumps(Evil()), "it asks for 'pathlib"),
        (b"cos\nsystem\n(S'touch evil'\ntR.", r"it asks for 'os\.system"),
        (b"cnumpy\nload\n(S'evil'\ntR.", r"it asks for 'numpy\.load"),
        (pickle.dumps([1]), "not a CIFAR batch"),
        (pickle.dumps({"data": [1], "labels": [1]}), "not a CIFAR batch"),
        (pickle.dumps({"data": images(2, 3072), "labels": [1]}, protocol=4), "is not 1 x 3072 bytes"),
        (pickle.dumps({"data": np.zeros((1, 3072)), "labels": [1]}, protocol=4), "is not 1 x 3072 bytes"),
        (pickle.dumps({"data": images(1, 3072), "labels": [1]}, protocol=4)[:-40], "get the original again"),
        (b"", "get the original again"),
        (b"\x80\x04X\xff\xff\xff\x7f", "get the original again"),
    ],
)
def test_bad_cifar_pickles(tmp_path, monkeypatch, content, match):
    monkeypatch.chdir(tmp_path)
    write_cifar(tmp_path)
    (tmp_path / "data_batch_3").write_bytes(content)
    assert "data_batch_3" in one_line(f"cifar:{tmp_path}", match)
    assert not (tmp_path / "evil").exists()


def test_cifar_files_missing_or_cut(tmp_path):
    one_line(f"cifar:{tmp_path}", "neither test_batch")
    write_cifar(tmp_path, binary=True)
    (tmp_path / "data_batch_2.bin").write_bytes(b"x" * 3074)
    one_line(f"cifar:{tmp_path}", "not a whole number of images")
    (tmp_path / "data_batch_2.bin").unlink()
    one_line(f"cifar:{tmp_path}", "data_batch_2.bin: no such file")


def test_npz_with_groups_and_test_rows(tmp_path):
    rng = KEY.generator()
    x, y, group = rng.normal(size=(8, 9, 4)), rng.integers(3, size=8), np.array(list("aabbccdd"))
    np.savez(tmp_path / "d.npz", x=x, y=y.astype(np.uint8), group=group, test=group == "d", names=["a"])
    data = load("npz:d.npz", tmp_path)
    np.testing.assert_array_equal(data.x, x.astype(np.float32))
    assert (data.x.dtype, data.y.dtype) == (np.float32, np.int64)
    assert data.group.tolist() == group.tolist()
    assert data.test.tolist() == [False] * 6 + [True] * 2
    assert data.validation is None


def test_npz_in_parts(tmp_path):
    x, y = images(9, 2, 3), np.arange(9) % 3
    parts = {"train": slice(5), "validation": slice(5, 7), "test": slice(7, 9)}
    columns = {f"{c}_{part}": a[rows] for part, rows in parts.items() for c, a in (("x", x), ("y", y))}
    np.savez(tmp_path / "d.npz", **columns)
    data = split(load("npz:d.npz", tmp_path), 0.5, 0.5)
    for part in parts:
        np.testing.assert_array_equal(data.part(part)[0], columns[f"x_{part}"])
        np.testing.assert_array_equal(data.part(part)[1], columns[f"y_{part}"])


@pytest.mark.parametrize(
    "labels", [np.arange(12)[:, None] % 3, np.arange(12.0) % 3, np.arange(12.0)[:, None] % 3]
)
def test_whole_labels_in_a_column_or_as_floats_are_classes(tmp_path, labels):
    np.savez(tmp_path / "d.npz", x=images(12, 2), y=labels)
    found = load("npz:d.npz", tmp_path)
    checked = CLASSIFICATION.checked(found.y, 3, "d")
    assert (checked.dtype, checked.tolist()) == (np.int64, (np.arange(12) % 3).tolist())
    with pytest.raises(DataError, match="classes are whole numbers"):
        CLASSIFICATION.checked(found.y + np.float32(0.5), 3, "d")


def test_an_npz_with_other_names_says_what_it_holds(tmp_path):
    np.savez(tmp_path / "d.npz", images=images(3, 2), labels=np.array(["a", None], object))
    with raises(DataError, "npz:d.npz", "images", "labels"):
        load("npz:d.npz", tmp_path)
    with raises(DataError, "mine", "pixels"):
        from_arrays("mine", {"pixels": np.ones((4, 2))})


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ({"y": np.arange(3)}, "x_train"),
        ({"x_train": images(3, 2), "y_train": np.arange(3), "x_test": images(3, 2)}, "y_test"),
        ({"x_test": images(3, 2), "y_test": np.arange(3)}, "x_train"),
        ({"x": images(3, 2), "y": np.arange(4)}, r"y has shape \(4,\) for 3 samples"),
        ({"x": images(3, 2), "y": np.arange(3), "group": np.arange(2)}, "group has shape"),
        ({"x": images(3, 2), "y": np.arange(3), "test": np.arange(3)}, "test must mark"),
        ({"x": images(3, 2), "y": np.array(["a", "b", "c"])}, "labels must be numbers"),
        ({"x": np.array([["a"], ["b"]]), "y": np.arange(2)}, "must hold numbers"),
        ({"x": images(0, 2), "y": np.arange(0)}, "not empty"),
        ({"x": np.arange(3), "y": np.arange(3)}, "must be"),
        ({"x_train": images(3, 2), "y_train": np.arange(2)}, "does not match"),
        (
            {
                "x_train": images(3, 2),
                "y_train": np.arange(3),
                "x_test": images(3, 4),
                "y_test": np.arange(3),
            },
            "x_test .* does not match",
        ),
        (
            {"x": np.array([{}, {}], object), "y": np.arange(2)},
            "object",
        ),
    ],
)
def test_bad_npz(tmp_path, columns, match):
    np.savez(tmp_path / "d.npz", **columns)
    one_line("npz:d.npz", match, tmp_path)


def test_npz_that_is_none(tmp_path):
    (tmp_path / "text.npz").write_text("hello")
    one_line("npz:text.npz", "not a readable .npz", tmp_path)
    np.savez(tmp_path / "whole.npz", x=images(50, 20), y=np.arange(50))
    whole = (tmp_path / "whole.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[:700])
    one_line("npz:cut.npz", "not a readable .npz", tmp_path)
    (tmp_path / "flipped.npz").write_bytes(whole[:500] + bytes([whole[500] ^ 1]) + whole[501:])
    one_line("npz:flipped.npz", "not a readable .npz", tmp_path)
    (tmp_path / "empty.npz").touch()
    one_line("npz:empty.npz", "not a readable .npz", tmp_path)
    np.save(tmp_path / "single.npy", np.arange(3))
    one_line("npz:single.npy", "a single array", tmp_path)
    one_line("npz:missing.npz", "there is no missing.npz")
    with zipfile.ZipFile(tmp_path / "other.npz", "w") as file:
        file.writestr("x.npy", "not an array")
        file.writestr("y.npy", b"\x93NUMPY\x01\x00\xff")
    one_line("npz:other.npz", "npz", tmp_path)
    (tmp_path / "folder.npz").mkdir()
    one_line("npz:folder.npz", "is a folder; expected a regular file", tmp_path)


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "fleetune_test_source.py").write_text(
        "import numpy as np\n"
        "def pair(): return np.zeros((4, 2)), np.arange(4)\n"
        "def named(): return {'x': np.zeros((4, 2)), 'y': np.arange(4), 'group': np.arange(4)}\n"
        "def broken(): return open('/nowhere/at/all')\n"
        "def number(): return 3\n"
        "def ragged(): return [[1, 2], [3]], [0, 1]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "fleetune_test_source"


def test_users_function(user_module):
    assert load(f"{user_module}:pair").x.shape == (4, 2)
    assert load(f"{user_module}:named").group.tolist() == [0, 1, 2, 3]
    one_line(f"{user_module}:broken", "failed: FileNotFoundError")
    one_line(f"{user_module}:number", r"returned int; expected \(x, y\)")
    one_line(f"{user_module}:ragged", "x is not an array")
    one_line(f"{user_module}:typo", "no attribute 'typo'; expected digits, idx:FOLDER")
    one_line("no_such_module_at_all:f", "No module named 'no_such_module_at_all'; expected digits")


def test_unknown_sources():
    for source in ("mnist", "idx:", "", ":", ":f"):
        one_line(source, "data.source .* expected digits, idx:FOLDER")


# splitting


@given(
    y=arrays.arrays(np.int64, st.integers(0, 60), elements=st.integers(0, 4)),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 9),
)
def test_stratified_takes_each_class_its_share(y, fraction, seed):
    picked = stratified(y, fraction, Key(seed))
    if len(y) < 2:
        assert not picked.any()
        return
    assert 1 <= picked.sum() <= len(y) - 1
    assert picked.sum() == np.clip(round(fraction * len(y)), 1, len(y) - 1)
    share = picked.sum() / len(y)
    for label in np.unique(y):
        assert abs(picked[y == label].sum() - share * (y == label).sum()) < 1
    assert np.array_equal(picked, stratified(y, fraction, Key(seed)))


def test_stratified_draws_within_a_class():
    y = np.zeros(100, np.int64)
    assert not np.array_equal(stratified(y, 0.3, KEY), stratified(y, 0.3, KEY.child("other")))
    assert not stratified(y, 0.0, KEY).any()


@given(shares=st.lists(st.integers(0, 50), min_size=1, max_size=12).filter(any), total=st.integers(0, 200))
def test_apportioned_numbers_add_up_and_are_within_one(shares, total):
    numbers, shares = apportion(np.array(shares), total), np.array(shares)
    assert numbers.sum() == total
    assert np.all(np.abs(numbers - shares * total / shares.sum()) < 1 + 1e-6)
    if total <= shares.sum():
        assert np.all(numbers <= shares)


def dataset(n=40, **rest):
    return Dataset(np.arange(n * 3, dtype=np.float32).reshape(n, 3), np.arange(n) % 4, **rest)


def rows(x):
    return sorted((x[:, 0] / 3).astype(int).tolist())


def test_split_without_official_roles():
    data = split(dataset(4000), 0.25, 0.2)
    sizes = [data.size(part) for part in ("train", "validation", "test")]
    np.testing.assert_allclose(sizes, [2400, 600, 1000], atol=60)  # two standard deviations
    assert rows(np.concatenate([data.x_train, data.x_validation, data.x_test])) == list(range(4000))
    np.testing.assert_array_equal(data.y_test, data.x_test[:, 0] / 3 % 4)


def test_split_respects_official_roles():
    test, validation = np.arange(40) >= 30, np.arange(40) < 4
    data = split(dataset(test=test), 0.5, 0.2)
    assert rows(data.x_test) == list(range(30, 40))
    assert 0 < data.size("validation") < 30
    data = split(dataset(test=test, validation=validation), 0.5, 0.5)
    assert (rows(data.x_train), rows(data.x_validation)) == (list(range(4, 30)), list(range(4)))
    data = split(dataset(validation=validation), 0.25, 0.5)
    assert rows(data.x_validation) == list(range(4))
    assert data.size("test") + data.size("train") == 36


def test_split_needs_a_training_and_a_test_sample():
    with pytest.raises(DataError, match="1 training and 0 test samples"):
        split(dataset(1), 0.3, 0.0)
    with pytest.raises(DataError, match="0 training and 3 test samples"):
        split(dataset(3, test=np.ones(3, bool)), 0.3, 0.0)
    alike = Dataset(np.zeros((5, 3), np.float32), np.zeros(5, np.int64))
    with pytest.raises(DataError, match="copies of a sample count as one"):
        split(alike, 0.3, 0.0)


def test_take_copies_a_devices_rows():
    everything = dataset()
    data = take(everything, np.arange(10), np.array([20, 21]), 0.2, KEY)
    assert rows(np.concatenate([data.x_train, data.x_validation])) == list(range(10))
    assert (rows(data.x_test), data.size("validation")) == ([20, 21], 2)
    data.x_train[:] = -1
    assert everything.x.min() == 0


def test_a_slice_on_disk_comes_back_as_it_was(tmp_path):
    for validation in (0.0, 0.2):
        data = split(dataset(), 0.25, validation)
        save_npz(tmp_path / "new" / "d.npz", data)
        again = split(load("npz:new/d.npz", tmp_path), 0.5, validation)
        for part in ("train", "validation", "test"):
            for column, saved in zip(again.part(part), data.part(part), strict=True):
                assert (column.dtype, column.tolist()) == (saved.dtype, saved.tolist())
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["d.npz"]


def test_a_slice_that_cannot_be_written(tmp_path):
    (tmp_path / "d.npz").mkdir()
    with pytest.raises(StoreError, match=r"cannot write .*d\.npz"):
        save_npz(tmp_path / "d.npz", split(dataset(), 0.5, 0))


# the model's input


def test_batches_become_the_models_input():
    x, y = images(6, 1, 2, 2), np.arange(6)
    data = DeviceData(x, y, x[:0], y[:0], x / np.float32(2), y, mean=0.5, std=0.25)
    order = np.array([4, 0])
    inputs, labels = data.batch("train", order)
    np.testing.assert_allclose(inputs, (x[order] / 255 - 0.5) / 0.25, atol=1e-6)
    assert (inputs.dtype, labels.tolist()) == (np.float32, [4, 0])
    np.testing.assert_allclose(data.batch("test", order)[0], (x[order] / 2 - 0.5) / 0.25, rtol=1e-6)
    inputs[:] = labels[:] = 0
    assert data.batch("train", order)[1].tolist() == [4, 0]
    np.testing.assert_array_equal(data.x_train, images(6, 1, 2, 2))


def test_one_number_a_channel_acts_as_one_for_all_where_they_are_equal():
    x, y = images(6, 3, 4, 2), np.arange(6)
    data, rows = DeviceData(x, y, x, y, x, y), np.arange(6)
    one, each = (
        scaled(data, *scaling, spec((3, 4, 2))) for scaling in [(0.3, 0.7), ((0.3,) * 3, (0.7,) * 3)]
    )
    np.testing.assert_array_equal(one.batch("train", rows)[0], each.batch("train", rows)[0])


def test_each_channel_has_its_own_mean_and_deviation():
    x, y = images(6, 3, 4, 2), np.arange(6)
    mean, std = (0.1, 0.2, 0.4), (1.0, 0.5, 0.25)
    inputs, _ = scaled(DeviceData(x, y, x, y, x, y), mean, std, spec((3, 4, 2))).batch("test", np.arange(6))
    for channel in range(3):
        expected = (x[:, channel] / 255 - mean[channel]) / std[channel]
        np.testing.assert_allclose(inputs[:, channel], expected, atol=1e-6)


def test_samples_without_height_have_a_number_for_each_feature():
    x, y = np.ones((4, 2), np.float32), np.zeros(4, np.int64)
    inputs, _ = scaled(DeviceData(x, y, x, y, x, y), (1.0, 3.0), 2.0, spec((2,))).batch("train", np.arange(4))
    assert inputs.tolist() == [[0, -1]] * 4


@pytest.mark.parametrize(
    ("mean", "std", "line"),
    [
        ((0.1, 0.2), 1.0, r"data.mean has 2 numbers; the model's input \(3, 4, 2\) has 3 channels: give one"),
        (0.0, (1.0,), r"data.std has 1 numbers; the model's input \(3, 4, 2\) has 3 channels"),
    ],
)
def test_as_many_numbers_as_channels(mean, std, line):
    x, y = images(6, 3, 4, 2), np.arange(6)
    with pytest.raises(SettingError, match=line):
        scaled(DeviceData(x, y, x, y, x, y), mean, std, spec((3, 4, 2)))


def fitted(x, wanted, classes=10, y=None):
    y = np.zeros(len(x), np.int64) if y is None else y
    return check_fits(DeviceData(x, y, x[:0], y[:0], x, y, source="mine"), spec(wanted, classes))


def test_images_take_the_models_shape():
    x = images(4, 28, 28)
    np.testing.assert_array_equal(fitted(x, (1, 28, 28)).x_test, x[:, None])
    color = images(4, 8, 6, 3)
    np.testing.assert_array_equal(fitted(color, (3, 8, 6)).x_train, np.moveaxis(color, 3, 1))
    assert fitted(color, (3, 8, 6)).x_validation.shape == (0, 3, 8, 6)
    assert fitted(color, (8, 6, 3)).x_train is color
    assert fitted(images(2, 3, 3, 3), (3, 3, 3)).x_train.tolist() == images(2, 3, 3, 3).tolist()


@pytest.mark.parametrize(
    ("x", "wanted"),
    [
        (images(4, 28, 28), (1, 32, 32)),
        (images(4, 8, 6, 5), (5, 8, 6)),
        (images(4, 8, 6, 3).astype(np.float32), (3, 8, 6)),
        (images(4, 1, 28, 28), (28, 28)),
    ],
)
def test_other_shapes_are_refused(x, wanted):
    with pytest.raises(DataError, match=r"mine: samples have shape .*; expected"):
        fitted(x, wanted)


def test_labels_and_inputs_are_checked():
    x = np.zeros((3, 2), np.float32)
    with pytest.raises(DataError, match=r"mine, train samples: label 3; the model has 0\.\.2"):
        fitted(x, (2,), 3, np.array([0, 3, 1]))
    with pytest.raises(DataError, match="label -1"):
        fitted(x, (2,), 3, np.array([0, -1, 1]))
    for bad in (np.nan, np.inf, -np.inf):
        with pytest.raises(DataError, match="mine: NaN or infinite inputs in the train samples"):
            fitted(np.array([[0, 1], [bad, 2]], np.float32), (2,))
    with pytest.raises(DataError, match="no training samples"):
        fitted(x[:0], (2,))


# real data


def test_fashion_mnist(data_folder):
    if not (data_folder / "fashion-mnist").is_dir():
        pytest.skip(f"no fashion-mnist in {data_folder}")
    data = load("idx:fashion-mnist", data_folder)
    assert data.x.shape == (70_000, 1, 28, 28)
    assert (data.x.dtype, data.test.sum(), data.y.max() + 1) == (np.uint8, 10_000, 10)
    assert np.bincount(data.y[data.test]).tolist() == [1000] * 10
    assert data.x[~data.test].mean() / 255 == pytest.approx(0.2860, abs=1e-4)  # the published mean
    check_fits(split(data, 0.3, 0.1), spec((1, 28, 28)))


def test_what_a_task_does_not_train_on_leaves_the_order_of_the_source_whole():
    """An autoencoder drops anomalies; the model trained alone has the held-out samples, too."""
    x, y = np.arange(20, dtype=np.float32)[:, None], np.arange(20) % 3 // 2
    found = split(Dataset(x, y, test=np.arange(20) >= 15, validation=np.arange(20) % 4 == 1), 0.2, 0.2)
    data = check_fits(found, spec((1,), 1), task_of(TaskSection(kind="reconstruction")))
    wanted = np.flatnonzero(y[:15] == 0)
    assert data.x_validation.size
    assert data.without_validation().x_train[:, 0].tolist() == wanted.tolist()
