"""Byte vectors of encodings: the product and a decoder without it read them alike; the docs show them."""

import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.wire import decoder
from tests.wire.vectors import NAMES, PATH, steps

from fleetune.protocols.randomness import Key
from fleetune.protocols.update import encodings
from fleetune.protocols.update.encodings.encoding import Known

VECTORS = json.loads(PATH.read_text())["vectors"]
PAGE = Path(__file__).parents[2] / "docs" / "wire.md"
every_vector = pytest.mark.parametrize("vector", VECTORS, ids=lambda one: f"{one['encoding']} {one['what']}")


def floats(data):
    return list(struct.unpack(f"<{len(data) // 4}f", data))


@every_vector
def test_a_decoder_without_the_product_reads_what_was_written(vector):
    reference = None if vector["base"] is None else floats(bytes.fromhex(vector["base"]))
    data = bytes.fromhex(vector["data"])
    values = decoder.decode(vector["encoding"], data, vector["count"], reference, vector["tensors"])
    assert struct.pack(f"<{len(values)}f", *values).hex() == vector["decoded"]


@every_vector
def test_the_product_reads_what_an_earlier_release_wrote(vector):
    reference = None if vector["base"] is None else np.frombuffer(bytes.fromhex(vector["base"]), "<f4")
    known = Known(reference, np.array(vector["tensors"], np.int16))
    data = bytes.fromhex(vector["data"])
    values = encodings.find(vector["encoding"]).decode(data, vector["count"], known)
    assert values.astype("<f4").tobytes().hex() == vector["decoded"]


@pytest.mark.parametrize("name", NAMES)
def test_both_read_several_chunks_alike(name):
    reference, values = steps(70_000)
    tensors = np.arange(70_000) // 30_000
    known, encoding = Known(reference, tensors.astype(np.int16)), encodings.find(name)
    data = encoding.encode(values, known, None, Key(1)).data
    alone = decoder.decode(name, data, values.size, reference.tolist(), tensors.tolist())
    assert alone == encoding.decode(data, values.size, known).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_the_bytes_of_three_values(name):
    (vector,) = (one for one in VECTORS if one["encoding"] == name and one["what"] == "three values")
    assert f"`{name}` | `{vector['data']}` |" in PAGE.read_text()


def test_the_decoder_shares_nothing_with_the_product():
    source = Path(decoder.__file__).read_text()
    assert "numpy" not in source.replace("no numpy", "")
    assert "fleetune" not in source
    assert "tests." not in source.replace("from tests.wire import lowrank_decoder", "")
    assert sys.modules["tests.wire.decoder"] is decoder
