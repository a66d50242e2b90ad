"""Byte vectors of the compact form: the product and a decoder without it read them alike.

`python -m tests.wire.test_compact_vectors` writes tests/wire/compact.json anew.
"""

import hashlib
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.conftest import tiny_spec
from tests.protocols.wire.test_compact_message import FROM_DEVICE, TO_DEVICE
from tests.wire import compact_decoder

from fleetune.protocols.method.averaging import Update
from fleetune.protocols.randomness import Key
from fleetune.protocols.update import codec, compact_frame, encodings
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.patch_values import PatchWriter
from fleetune.protocols.update.reference_model import ReferenceModel
from fleetune.protocols.update.selection import Everything
from fleetune.protocols.wire import messages as wire
from fleetune.protocols.wire.payloads import Measures, Reply

PATH = Path(__file__).parent / "compact.json"
VECTORS = json.loads(PATH.read_text()) if PATH.exists() else {"messages": [], "payload": {}, "dictionary": ""}
SPEC = tiny_spec()
NESTED = ("Offer", "Ready", "Measured")  # their JSON holds defaults of what is in them
BASE = ReferenceModel.whole(np.arange(SPEC.size, dtype=np.float32) / 8)


def reply():
    update = Update(Patch(Everything(), (BASE.values + np.float32(0.01))[: SPEC.num_parameters]), 140)
    return Reply("pi-kitchen", 3, 1, False, Measures(140, 60, 0.25, 1 / 3, 1.0), update, BASE.digest)


def payload():
    writer = PatchWriter(encodings.find("sketch"), SPEC, Key(1), BASE)
    return codec.encode(reply(), SPEC, writer=writer, compact=True)


def of(vector):
    return bytes.fromhex(vector["compact"])


def product_reads(vector, data):
    return (wire.read_from_device if vector["from"] == "device" else wire.read_to_device)(data)


@pytest.mark.parametrize("vector", VECTORS["messages"], ids=lambda one: one["json"]["type"])
def test_a_decoder_without_the_product_reads_messages(vector):
    found = compact_decoder.message(of(vector))
    assert found.items() <= vector["json"].items() or found["type"] in NESTED
    assert product_reads(vector, json.dumps(found).encode()) == product_reads(vector, of(vector))


@pytest.mark.parametrize("vector", VECTORS["messages"], ids=lambda one: one["json"]["type"])
def test_the_product_reads_and_writes_both_forms(vector):
    message = product_reads(vector, of(vector))
    assert msgspec.to_builtins(message) == vector["json"]
    assert wire.encode(message, compact=True) == of(vector)
    assert json.loads(wire.encode(message)) == vector["json"]


def test_both_read_a_payload():
    data, told = of(VECTORS["payload"]), VECTORS["payload"]["json"]
    model, content = compact_decoder.payload(data, bytes.fromhex(VECTORS["dictionary"]))
    assert hashlib.blake2b(data[17:], digest_size=4).digest() == data[13:17]
    name, shape, values = content["update"]["patch"].pop("values")
    assert [name, shape, values.hex()] == VECTORS["payload"]["values"]
    assert (model, content) == (SPEC.hash, told)
    found = codec.decode(data, Reply[Update], SPEC, limit=codec.payload_limit(SPEC), reference=BASE)
    assert (found.device, found.measures, found.base) == ("pi-kitchen", reply().measures, BASE.digest)
    assert payload() == data


def test_the_page_shows_an_acknowledgement_and_the_dictionarys_digest():
    page = compact_decoder.PAGE.read_text()
    ack = wire.Ack("7619983568d0c408a9c447c4b66c60fb", 8)
    assert f"`{wire.encode(ack, compact=True).hex()}`" in page
    dictionary = bytes.fromhex(VECTORS["dictionary"])
    assert dictionary == compact_frame.DICTIONARY.as_bytes()
    assert f"`{hashlib.blake2b(dictionary, digest_size=16).hexdigest()}`" in page


def test_the_decoder_shares_nothing_with_the_product():
    source = Path(compact_decoder.__file__).read_text()
    assert "fleetune" not in source
    assert "msgspec" not in source


def write() -> None:
    """All vectors anew."""
    messages = [
        {"from": side, "json": msgspec.to_builtins(one), "compact": wire.encode(one, compact=True).hex()}
        for side, all_of in (("device", FROM_DEVICE), ("coordinator", TO_DEVICE))
        for one in all_of
    ]
    dictionary = compact_frame.DICTIONARY.as_bytes()
    content = compact_decoder.payload(payload(), dictionary)[1]
    name, shape, values = content["update"]["patch"].pop("values")
    told = {"json": content, "values": [name, shape, values.hex()], "compact": payload().hex()}
    about = "control messages and an update in the compact form (docs/wire.md, Compact), in hex"
    found = {"about": about, "dictionary": dictionary.hex(), "messages": messages, "payload": told}
    PATH.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    write()
