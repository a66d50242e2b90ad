"""What an agent reads: sets of features, differences, bounds."""

import json
from itertools import pairwise

import pytest

from fleetune.protocols.bundle.graph import OPERATORS
from fleetune.protocols.errors import PacketCorrupt, PacketTooLarge
from fleetune.protocols.update.encodings import RAW, REGISTRY
from fleetune.protocols.wire import messages as wire
from fleetune.protocols.wire.capabilities import (
    EVERYTHING,
    MOST_FEATURES,
    ONLY_THE_MINIMUM,
    SETS,
    Capabilities,
    Features,
)


def test_the_last_set_is_what_this_version_reads():
    """A new encoding or operator needs a new set: see the top of capabilities.py."""
    assert (RAW, *SETS[-1].encodings) == tuple(REGISTRY)
    assert set(SETS[-1].operators) == OPERATORS
    assert EVERYTHING.features == SETS[-1]


def test_sets_only_grow():
    for before, after in pairwise(SETS):
        assert not before.without(after)


def test_differences_apply_to_the_set():
    reads = Capabilities(1, lacks=Features(("sketch", "peaks")), also=Features(("wavelet",)))
    assert Features(("lossless", "wavelet")).without(reads.features) == Features()
    assert Features(("raw", "peaks"), ("coded",)).without(ONLY_THE_MINIMUM.features)
    assert str(Features(("sketch", "int8")).without(reads.features)) == "encoding sketch"


def test_a_later_set_counts_as_the_last_known_one():
    assert Capabilities(99).features == SETS[-1]


def test_features_in_words():
    assert str(Features()) == ""
    assert (
        str(Features(("sketch",), operators=("Conv", "Gemm"))) == "encoding sketch, operators Conv and Gemm"
    )
    assert "3 more" in str(Features(operators=tuple(f"Op{number}" for number in range(8))))


def presence(**reads):
    return json.dumps(
        {"type": "Presence", "online": True, "instance": "x", "version": wire.VERSION, "reads": reads}
    ).encode()


@pytest.mark.parametrize(
    "reads",
    [
        {"set": -1},
        {"set": 2**40},
        {"set": "1"},
        {"also": {"encodings": ["a b"]}},
        {"also": {"encodings": [""]}},
        {"also": {"encodings": ["x" * 41]}},
        {"also": {"encodings": ["x\n"]}},
        {"also": {"encodings": ["x"] * (MOST_FEATURES + 1)}},
        {"lacks": {"masks": "coded"}},
        {"lacks": {"colours": ["red"]}},
        {"more": 1},
    ],
    ids=str,
)
def test_made_up_capabilities_are_refused(reads):
    with pytest.raises(PacketCorrupt):
        wire.read_from_device(presence(**reads))


def test_a_list_of_ten_thousand_is_refused_before_it_is_read():
    with pytest.raises(PacketTooLarge):
        wire.read_from_device(presence(also={"encodings": [f"e{number}" for number in range(10_000)]}))


def test_capabilities_read_back():
    reads = Capabilities(1, lacks=Features(operators=("Conv",)), also=Features(("wavelet",)))
    message = wire.Presence(True, "x", name="Küche", reads=reads)
    assert wire.read_from_device(wire.encode(message)) == message
