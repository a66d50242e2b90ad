"""Byte vectors of masks: the product and a decoder without it read them alike."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from tests.wire import mask_decoder, sparse_decoder
from tests.wire.mask_vectors import PATH, model, small_ones, vectors

from fleetune.protocols.update.masks.coded_mask import predicted, read_mask
from fleetune.protocols.update.reference_model import ReferenceModel

VECTORS = json.loads(PATH.read_text())["vectors"]
PAGE = Path(__file__).parents[2] / "docs" / "wire.md"
every_vector = pytest.mark.parametrize("vector", VECTORS, ids=lambda one: one["what"])


def flags_of(text, count):
    return np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8), count=count).view(np.bool_)


def base_of(vector):
    if vector["base"] is None:
        return None
    values = np.frombuffer(bytes.fromhex(vector["base"]), "<f4")
    return ReferenceModel(values, flags_of(vector["held"], vector["count"]))


def row_sizes(shapes):
    return [(math.prod(shape), math.prod(shape[1:])) for shape in shapes]


@every_vector
def test_a_decoder_without_the_product_reads_what_was_written(vector):
    reference = base_of(vector)
    held = (None, None) if reference is None else (reference.values.tolist(), reference.held.tolist())
    data = bytes.fromhex(vector["data"])
    flags = mask_decoder.decode(data, vector["count"], *held, row_sizes(vector["shapes"]))
    assert flags == flags_of(vector["mask"], vector["count"]).tolist()


@every_vector
def test_the_product_reads_what_an_earlier_release_wrote(vector):
    data = bytes.fromhex(vector["data"])
    flags = read_mask(data, vector["count"], model(vector["shapes"]), base_of(vector))
    assert flags.tolist() == flags_of(vector["mask"], vector["count"]).tolist()


def test_the_product_writes_the_same_bytes_still():
    assert vectors() == VECTORS


def test_both_read_several_blocks_alike():
    shapes = ((165, 100),)
    mask, reference = small_ones(16_500, 100)
    data = predicted(mask, model(shapes), reference)
    read = mask_decoder.decode(
        data, mask.size, reference.values.tolist(), reference.held.tolist(), row_sizes(shapes)
    )
    assert read == read_mask(data, mask.size, model(shapes), reference).tolist() == mask.tolist()


def test_the_page_shows_the_bytes_of_ten_flags():
    shown = {vector["what"]: vector["data"] for vector in VECTORS}
    assert f"`{shown['ten flags']}`" in PAGE.read_text()
    assert f"`{shown['ten flags, predicted']}`" in PAGE.read_text()


def test_the_decoders_share_nothing_with_the_product():
    for each in (mask_decoder, sparse_decoder):
        source = Path(each.__file__).read_text()
        assert "numpy" not in source.replace("no numpy", "")
        assert "fleetune" not in source
