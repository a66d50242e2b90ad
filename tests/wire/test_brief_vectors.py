"""Byte vectors of the brief form: the product and a decoder without it read them alike; the page shows them.

`python -m tests.wire.test_brief_vectors` writes tests/wire/brief.json anew.
"""

import hashlib
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.conftest import tiny_spec
from tests.protocols.wire.test_brief_message import FROM_DEVICE, TO_DEVICE
from tests.wire import brief_decoder

from fleetune.protocols.method.averaging import Update
from fleetune.protocols.randomness import Key
from fleetune.protocols.update import codec, encodings
from fleetune.protocols.update.base import Base
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.patch_values import PatchWriter
from fleetune.protocols.update.selection import Everything
from fleetune.protocols.wire import messages as wire
from fleetune.protocols.wire.payloads import Measures, Reply

PATH = Path(__file__).parent / "brief.json"
VECTORS = json.loads(PATH.read_text()) if PATH.exists() else {"messages": [], "payload": {}}
SPEC = tiny_spec()
BASE = Base.whole(np.arange(SPEC.size, dtype=np.float32) / 8)


def reply():
    update = Update(Patch(Everything(), (BASE.values + np.float32(0.01))[: SPEC.num_parameters]), 140)
    return Reply("pi-kitchen", 3, 1, False, Measures(140, 60, 0.25, 1 / 3, 1.0), update, BASE.digest)


def payload():
    writer = PatchWriter(encodings.find("sketch"), SPEC, Key(1), BASE)
    return codec.encode(reply(), SPEC, writer=writer, briefly=True)


def of(vector):
    return bytes.fromhex(vector["brief"])


@pytest.mark.parametrize("vector", VECTORS["messages"], ids=lambda one: one["json"]["type"])
def test_a_decoder_without_the_product_reads_messages(vector):
    assert brief_decoder.message(of(vector)) == vector["json"]


@pytest.mark.parametrize("vector", VECTORS["messages"], ids=lambda one: one["json"]["type"])
def test_the_product_reads_and_writes_what_an_earlier_release_wrote(vector):
    read = wire.read_from_device if vector["from"] == "device" else wire.read_to_device
    message = read(of(vector))
    assert msgspec.to_builtins(message) == vector["json"]
    assert wire.encode(message, briefly=True) == of(vector)


def test_both_read_a_payload():
    data, told = of(VECTORS["payload"]), VECTORS["payload"]["json"]
    model, content = brief_decoder.payload(data)
    assert hashlib.blake2b(data[18:], digest_size=4).digest() == data[14:18]
    name, shape, values = content["update"]["patch"].pop("values")
    assert [name, shape, values.hex()] == VECTORS["payload"]["values"]
    assert (model, content) == (SPEC.hash, told)
    found = codec.decode(data, Reply[Update], SPEC, limit=codec.payload_limit(SPEC), base=BASE)
    assert (found.device, found.measures, found.base) == ("pi-kitchen", reply().measures, BASE.digest)
    assert payload() == data


def test_the_page_shows_an_acknowledgement():
    page = brief_decoder.PAGE.read_text()
    ack = wire.Ack("7619983568d0c408a9c447c4b66c60fb", 8)
    assert f"`{wire.encode(ack, briefly=True).hex()}`" in page


def test_the_decoder_shares_nothing_with_the_product():
    source = Path(brief_decoder.__file__).read_text()
    assert "fleetune" not in source
    assert "msgspec" not in source


def write() -> None:
    """All vectors anew."""
    messages = [
        {"from": side, "json": msgspec.to_builtins(one), "brief": wire.encode(one, briefly=True).hex()}
        for side, all_of in (("device", FROM_DEVICE), ("coordinator", TO_DEVICE))
        for one in all_of
    ]
    content = brief_decoder.payload(payload())[1]
    name, shape, values = content["update"]["patch"].pop("values")
    told = {"json": content, "values": [name, shape, values.hex()], "brief": payload().hex()}
    about = (
        "small messages and an update in their brief form (docs/wire.md, Brief), in hex, and what they say"
    )
    PATH.write_text(json.dumps({"about": about, "messages": messages, "payload": told}, indent=1) + "\n")


if __name__ == "__main__":
    write()
