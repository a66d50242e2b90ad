"""examples/fleetune.ipynb runs as it stands, in a kernel of its own, and comes to what is kept in it."""

import io
import json
import re
import subprocess
import sys

import pandas as pd
import pytest
from tests.helpers.places import ROOT

NOTEBOOK = ROOT / "examples" / "fleetune.ipynb"
MOST_BYTES = 300_000
EXECUTE = """
import nbformat, sys
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], 4)
NotebookClient(notebook, timeout=200, resources={"metadata": {"path": sys.argv[2]}}).execute()
nbformat.write(notebook, sys.argv[3])
"""


def outputs(notebook):
    """Of each cell of code: the text of its last value, and whether it is a picture."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    found = [cell["outputs"][-1]["data"] if cell["outputs"] else {} for cell in cells]
    return [("".join(data.get("text/plain", "")), "image/png" in data) for data in found]


def test_the_notebook_comes_to_what_it_shows(tmp_path):
    made = tmp_path / "made.ipynb"
    command = [sys.executable, "-c", EXECUTE, str(NOTEBOOK), str(tmp_path), str(made)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    kept, found = (outputs(json.loads(path.read_text())) for path in (NOTEBOOK, made))
    assert [is_picture for _, is_picture in found] == [is_picture for _, is_picture in kept]
    digests = [re.findall(r"given:\w{16}", text) for text, _ in (kept[-2], found[-2])]
    assert digests[0] == digests[1]
    assert len(digests[0]) == 2
    was, came = (pd.read_fwf(io.StringIO(text[-1][0])).dropna() for text in (kept, found))
    assert list(came.columns) == list(was.columns)
    assert (came.iloc[:, :2] == was.iloc[:, :2]).all(axis=None)  # devices and their samples
    personal = [float(table.iloc[:, -1].mean()) for table in (was, came)]
    assert personal[1] == pytest.approx(personal[0], abs=0.05)  # other processors round otherwise


def test_the_notebook_is_small_and_of_one_piece():
    notebook = json.loads(NOTEBOOK.read_text())
    counts = [cell["execution_count"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert NOTEBOOK.stat().st_size < MOST_BYTES
    assert [
        kind
        for cell in notebook["cells"]
        for kind in cell.get("outputs", [])
        if kind["output_type"] == "error"
    ] == []
