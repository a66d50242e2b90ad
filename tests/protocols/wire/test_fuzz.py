"""A few thousand mutated packets of every kind; `python -m tests.fuzz` reads a million."""

from contextlib import ExitStack, suppress

import pytest
from tests.fuzz.encodings import fuzz as fuzz_encoding
from tests.fuzz.masks import fuzz as fuzz_masks
from tests.fuzz.run import fuzz
from tests.fuzz.targets import all_targets

from fleetune.protocols.errors import PacketError
from fleetune.protocols.update import encodings


def test_every_honest_packet_is_read():
    with ExitStack() as closing:
        for target in all_targets(closing):
            for packet in target.packets:
                if target.name.startswith("message"):  # it may come out of turn
                    with suppress(PacketError):
                        target.read(packet)
                else:
                    target.read(packet)


@pytest.mark.parametrize("seed", [101, 102])
def test_mutated_packets_are_read_or_refused_by_name(seed):
    count, verdicts, found = fuzz(seed, 3000)
    assert not found
    assert sum(verdicts.values()) == count
    assert len(verdicts) >= 6  # of many kinds
    assert verdicts["read"] > count / 50  # and some changes do no harm


@pytest.mark.parametrize("name", encodings.REGISTRY)
def test_changed_bytes_of_every_encoding_are_read_or_refused_by_name(name):
    verdicts = fuzz_encoding(encodings.find(name), 7, 1500)
    assert sum(verdicts.values()) == 1500
    assert verdicts["read"]
    assert verdicts["PacketCorrupt"]


def test_changed_bytes_of_masks_are_read_or_refused_by_name():
    verdicts = fuzz_masks(7, 600)
    assert sum(verdicts.values()) == 600
    assert verdicts["read"]
    assert verdicts["PacketCorrupt"]
