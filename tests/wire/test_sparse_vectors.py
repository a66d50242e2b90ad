"""Byte vectors of `sparse`: the product and a decoder without it read them alike."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from tests.wire import sparse_decoder
from tests.wire.sparse_vectors import PATH, changes

from fleetune.protocols.randomness import Key
from fleetune.protocols.update.encodings.encoding import Known
from fleetune.protocols.update.encodings.sparse import Sparse

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
    values = sparse_decoder.decode(data, vector["count"], reference, *known)
    assert struct.pack(f"<{len(values)}f", *values).hex() == vector["decoded"]


@every_vector
def test_the_product_reads_what_an_earlier_release_wrote(vector):
    reference = None if vector["base"] is None else np.frombuffer(bytes.fromhex(vector["base"]), "<f4")
    places = None if vector["places"] is None else np.array(vector["places"], np.int32)
    known = Known(reference, np.array(vector["tensors"], np.int16), tuple(vector["row_sizes"]), places)
    values = Sparse().decode(bytes.fromhex(vector["data"]), vector["count"], known)
    assert values.astype("<f4").tobytes().hex() == vector["decoded"]


def test_both_read_several_blocks_alike():
    values, count = changes(40_000, 200), 40_000
    reference = np.linspace(-1, 1, count, dtype=np.float32)
    tensors = np.repeat([0, 1], [37_000, 3_000])
    known = Known(reference, tensors.astype(np.int16), (200, 100))
    data = Sparse(density=0.05).encode(reference + values, known, None, Key(1)).data
    alone = sparse_decoder.decode(data, count, reference.tolist(), tensors.tolist(), (200, 100), None)
    assert alone == Sparse().decode(data, count, known).tolist()


def test_the_page_shows_the_bytes_of_three_values():
    (vector,) = (one for one in VECTORS if one["what"] == "three values")
    assert f"`{vector['data']}`" in PAGE.read_text()


def test_the_decoder_shares_nothing_with_the_product():
    source = Path(sparse_decoder.__file__).read_text()
    assert "numpy" not in source.replace("no numpy", "")
    assert "fleetune" not in source
    assert "tests." not in source
