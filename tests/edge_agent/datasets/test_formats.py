"""Every registered data set format, and a new one."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from tests.helpers import hostile_files
from tests.helpers.errors import raises

from fleetune.edge_agent.datasets.dataset import make_dataset
from fleetune.edge_agent.datasets.formats import FORMATS, DatasetFormat
from fleetune.edge_agent.datasets.sources import load
from fleetune.edge_agent.stream.sample_stream import is_stream
from fleetune.protocols.errors import DataError

DOCS = Path(__file__).parents[3] / "docs" / "data.md"


@pytest.mark.parametrize("kind", FORMATS)
def test_each_format_is_documented_and_refuses_data_that_are_missing(kind, tmp_path):
    assert f"`{kind}:{FORMATS[kind].place}" in DOCS.read_text(encoding="utf-8")
    with pytest.raises(DataError, match="there is no missing in") as raised:
        load(f"{kind}:missing", tmp_path)
    assert str(raised.value).startswith(f"{kind}:missing")
    assert not is_stream(f"{kind}:missing")


@pytest.mark.parametrize("kind", FORMATS)
def test_each_format_names_a_file_that_is_not_its_own(kind, tmp_path):
    wrong = tmp_path / "wrong"
    if FORMATS[kind].place == "FOLDER":
        wrong.mkdir()
    else:
        wrong.write_bytes(b"\0" * 64)
    with pytest.raises(DataError, match="wrong"):
        load(f"{kind}:{wrong}", tmp_path)


def test_a_header_of_64_mb_in_64_kb_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "a.npz"
    hostile_files.write_long_header_npz(path)
    assert path.stat().st_size < 70_000
    tracemalloc.start()
    try:
        with raises(DataError, str(path), "67,108,864 bytes", "10,000"):
            load(f"npz:{path}")
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_a_new_format_takes_one_line(tmp_path, monkeypatch):
    def load_text(source, path, options):
        return make_dataset(source, np.loadtxt(path, ndmin=2), None if options == "bare" else [0, 1])

    monkeypatch.setitem(FORMATS, "text", DatasetFormat("FILE", load_text, takes_options=True))
    (tmp_path / "a.txt").write_text("1 2\n3 4\n")
    assert load("text:a.txt", tmp_path).y.tolist() == [0, 1]
    assert load("text:a.txt?bare", tmp_path).y.shape == (2, 0)
    assert not is_stream("text:a.txt")
