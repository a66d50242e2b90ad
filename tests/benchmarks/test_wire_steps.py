"""Single steps in `python -m benchmarks.wire --steps`: what each encoding and rival costs and loses."""

import sys

import numpy as np
import pytest
from benchmarks.recorded_updates import Sent, known_of
from benchmarks.rival_environments import NotInstalled
from benchmarks.wire import nnc
from benchmarks.wire.rate_distortion import markdown, measured, measured_nnc
from tests.conftest import tiny_spec

from fleetune.protocols.randomness import Key


@pytest.fixture(scope="module")
def step():
    spec, draws = tiny_spec(60), Key.of("steps").generator()
    base = draws.standard_normal(spec.size).astype(np.float32)
    step = (1e-3 * draws.standard_normal(spec.size) ** 3).astype(np.float32)
    known = known_of(np.ones(spec.size, np.bool_), base, spec)
    return Sent(known, base + step, 2)


@pytest.fixture(scope="module")
def found(step):
    return measured([step])


def test_less_is_lost_where_more_is_sent(found):
    assert found["lossless"]["error"] == 0
    ours = [found[name] for name in ("int8", "int4", "sparse 0.1", "sparse 0.02", "sparse 0.005")]
    assert [row["share"] for row in ours] == sorted((row["share"] for row in ours), reverse=True)
    assert [row["error"] for row in ours] == sorted(row["error"] for row in ours)
    products = [found[f"lowrank {step:g}"] for step in (0.5, 1, 2, 3, 4, 6)]
    assert [row["share"] for row in products] == sorted((row["share"] for row in products), reverse=True)
    assert [row["error"] for row in products] == sorted(row["error"] for row in products)
    assert found["stc 1/200"]["error"] > found["stc 1/50"]["error"] > found["sparse 0.02"]["error"]


def test_a_table_has_a_line_each_the_largest_first(found):
    lines = markdown({"hot": found, "calm": found}).splitlines()
    assert len(lines) == 2 + len(found)
    shares = [float(line.split("|")[2]) for line in lines[2:]]
    assert shares == sorted(shares, reverse=True)


def test_nncodec_gets_each_tensor_as_the_matrix_of_its_rows():
    spec = tiny_spec(60)
    values = np.arange(spec.size, dtype=np.float32)
    known = known_of(np.ones(spec.size, np.bool_), np.ones_like(values), spec)
    tensors = nnc.tensors_of(Sent(known, values, 1))
    assert [one.shape[0] for one in tensors.values()] == [tensor.shape[0] for tensor in spec.tensors]
    assert np.array_equal(np.concatenate([one.ravel() for one in tensors.values()]), values - 1)


def test_nncodec_is_left_out_with_the_reason_where_it_does_not_run(tmp_path, step):
    python = tmp_path / "nncodec" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)  # an environment without it
    (tmp_path / "nncodec" / "made").touch()
    with pytest.raises(NotInstalled, match="No module named 'nncodec'"):
        measured_nnc([step], tmp_path)


def test_what_nncodec_says_becomes_share_and_error(tmp_path, step, monkeypatch):
    lines = {
        name: {"num_bytes": 60, "squared_error": 0.0, "encode_s": 1.0, "decode_s": 2.0}
        for name in nnc.settings()
    }
    monkeypatch.setattr(nnc, "measured", lambda patches, _: [lines for _ in patches])
    row = measured_nnc([step, step], tmp_path)["nnc -38"]
    assert row["share"] == 60 / step.values.nbytes
    assert row["error"] == 0
    assert row["encode"] == 2 * row["decode"] == step.values.nbytes / 1e6
