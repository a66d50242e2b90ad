"""Single steps in `edge-sim bench wire --steps`: what each encoding and rival costs and loses."""

import numpy as np
import pytest
from tests.conftest import tiny_spec

from fleetune.protocols.randomness import Key
from fleetune.tools.bench.trained_differences import Sent, known_of
from fleetune.tools.bench.wire.rate_distortion import markdown, measured


@pytest.fixture(scope="module")
def found():
    spec, draws = tiny_spec(60), Key.of("steps").generator()
    base = draws.standard_normal(spec.size).astype(np.float32)
    step = (1e-3 * draws.standard_normal(spec.size) ** 3).astype(np.float32)
    known = known_of(np.ones(spec.size, np.bool_), base, spec)
    return measured([Sent(known, base + step, 2)])


def test_less_is_lost_where_more_is_sent(found):
    assert found["lossless"]["error"] == 0
    ours = [found[name] for name in ("fp16", "int8", "int4", "sparse 0.1", "sparse 0.02", "sparse 0.005")]
    assert [row["share"] for row in ours] == sorted((row["share"] for row in ours), reverse=True)
    assert [row["error"] for row in ours] == sorted(row["error"] for row in ours)
    products = [found[f"lowrank {step:g}"] for step in (0.5, 1, 2, 3, 4, 6)]
    assert [row["share"] for row in products] == sorted((row["share"] for row in products), reverse=True)
    assert [row["error"] for row in products] == sorted(row["error"] for row in products)
    assert found["stc 1/200"]["error"] > found["stc 1/50"]["error"] > found["sparse 0.02"]["error"]


def test_a_table_has_a_line_each_the_largest_first(found):
    lines = markdown(found).splitlines()
    assert len(lines) == 2 + len(found)
    shares = [float(line.split("|")[2]) for line in lines[2:]]
    assert shares == sorted(shares, reverse=True)
