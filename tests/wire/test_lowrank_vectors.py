"""Byte vectors of `lowrank`: the product and a decoder without it read them alike."""

import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from tests.wire import lowrank_decoder
from tests.wire.lowrank_vectors import PATH, changes

from fleetune.protocols.randomness import Key
from fleetune.protocols.update.encodings.encoding import Known
from fleetune.protocols.update.encodings.lowrank import LowRank

VECTORS = json.loads(PATH.read_text())["vectors"]
PAGE = Path(__file__).parents[2] / "docs" / "wire.md"
every_vector = pytest.mark.parametrize("vector", VECTORS, ids=lambda one: one["what"])


@every_vector
def test_a_decoder_without_the_product_reads_what_was_written(vector):
    reference = (
        None if vector["base"] is None else list(np.frombuffer(bytes.fromhex(vector["base"]), "<f4").tolist())
    )
    data = bytes.fromhex(vector["data"])
    known = vector["tensors"], vector["row_sizes"], vector["places"]
    values = lowrank_decoder.decode(data, vector["count"], reference, *known)
    assert struct.pack(f"<{len(values)}f", *values).hex() == vector["decoded"]


@every_vector
def test_the_product_reads_what_an_earlier_release_wrote(vector):
    reference = None if vector["base"] is None else np.frombuffer(bytes.fromhex(vector["base"]), "<f4")
    places = None if vector["places"] is None else np.array(vector["places"], np.int32)
    known = Known(reference, np.array(vector["tensors"], np.int16), tuple(vector["row_sizes"]), places)
    values = LowRank().decode(bytes.fromhex(vector["data"]), vector["count"], known)
    assert values.astype("<f4").tobytes().hex() == vector["decoded"]


def test_both_read_a_large_matrix_alike():
    """Its sum is made in parts."""
    rows, columns = 90, 800
    values, reference = changes(rows, columns, rank=12), np.linspace(-1, 1, rows * columns, dtype=np.float32)
    known = Known(reference, row_sizes=(columns,))
    data = LowRank(0.5).encode(reference + values, known, None, Key(1)).data
    alone = lowrank_decoder.decode(data, values.size, reference.tolist(), [], (columns,), None)
    assert alone == LowRank().decode(data, values.size, known).tolist()


def test_the_page_shows_the_bytes_of_three_values():
    (vector,) = (one for one in VECTORS if one["what"] == "three values")
    assert f"`{vector['data']}`" in PAGE.read_text()


def test_the_decoder_shares_nothing_with_the_product():
    source = Path(lowrank_decoder.__file__).read_text()
    assert "numpy" not in source.replace("no numpy", "")
    assert "fleetune" not in source
    assert "tests." not in re.sub(r"tests\.wire\.\w+_decoder", "", source), (
        "other decoders share nothing either"
    )
