"""Byte vectors of presences: the product and a decoder without it find the same features.

`python -m tests.wire.test_presence_vectors` writes tests/wire/presence.json anew.
"""

import json
from pathlib import Path

import msgspec
import pytest
from tests.wire import presence_decoder

from fleetune.protocols.wire import messages as wire
from fleetune.protocols.wire.capabilities import EVERYTHING, SETS, Capabilities, Features

PATH = Path(__file__).parent / "presence.json"
VECTORS = json.loads(PATH.read_text())["presences"] if PATH.exists() else []
PRESENCES = (
    wire.Presence(True, "4f1c", "fleetune 0.1.0", reads=EVERYTHING),
    wire.Presence(True, "4f1c", "web-agent 1", name="Küche", reads=Capabilities(also=Features(("int8",)))),
    wire.Presence(True, "4f1c", "c-agent 2", reads=Capabilities(1, lacks=Features(("sketch",), ("coded",)))),
    wire.Presence(True, "4f1c", "of tomorrow", reads=Capabilities(7, also=Features(operators=("Einsum",)))),
    wire.Presence(True, "4f1c", "says nothing"),
    wire.Presence(False, "4f1c"),
)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda one: one["agent"])
def test_a_decoder_without_the_product_finds_the_same_features(vector):
    data = vector["json"].encode()
    assert presence_decoder.features(data) == vector["features"]
    presence = wire.read_from_device(data)
    assert features(presence) == vector["features"]
    assert wire.encode(presence) == data


def test_the_page_lists_the_sets_of_the_product():
    told = [{kind: sorted(names) for kind, names in msgspec.structs.asdict(one).items()} for one in SETS]
    assert [{kind: sorted(names) for kind, names in one.items()} for one in presence_decoder.sets()] == told


def test_an_agent_that_reads_everything_reports_few_bytes():
    said = wire.encode(PRESENCES[0])
    assert len(said) - len(wire.encode(msgspec.structs.replace(PRESENCES[0], reads=msgspec.UNSET))) == 18


def test_the_decoder_shares_nothing_with_the_product():
    source = Path(presence_decoder.__file__).read_text()
    assert "fleetune" not in source
    assert "msgspec" not in source


def features(presence):
    """All features of a presence, by kind."""
    reads = Capabilities() if presence.reads is msgspec.UNSET else presence.reads
    return {kind: " ".join(sorted(names)) for kind, names in msgspec.structs.asdict(reads.features).items()}


def write() -> None:
    """All vectors anew."""
    found = [
        {"agent": one.agent, "json": wire.encode(one).decode(), "features": features(one)}
        for one in PRESENCES
    ]
    about = "presences, and the features that each agent reads (docs/wire.md, What an agent reads)"
    PATH.write_text(json.dumps({"about": about, "presences": found}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    write()
