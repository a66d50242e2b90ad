"""What encoding and decoding a payload take beside what goes in and comes out; what few bytes can take."""

import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from tests.conftest import tiny_spec
from tests.hostile import body_of
from tests.protocols.update.test_codec import forged

from fleetune.protocols.errors import PacketCorrupt, PacketError, PacketTooLarge, PacketTruncated
from fleetune.protocols.method.averaging import SharedModel, Task
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key
from fleetune.protocols.update import codec, encodings
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.patch_values import PatchWriter
from fleetune.protocols.update.reference_model import ReferenceModel
from fleetune.protocols.update.selection import Everything

SPEC = tiny_spec(hidden=200_000)  # two million entries
LIMIT = codec.payload_limit(SPEC)
WORKING_SPACE = (
    1_300_000  # bytes: a chunk's scratch space and what is unpacked at a time; no mask of the model
)


def peak(work: Callable[[], object]) -> int:
    """Bytes that were allocated at once meanwhile."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def update():
    draw = Key.of("memory").generator()
    held = draw.normal(0, 0.05, SPEC.size).astype(np.float32)
    values = held + draw.normal(0, 1e-3, SPEC.size).astype(np.float32)
    return ReferenceModel.whole(held), Task(Patch.of(values, Everything(), SPEC))


# To encode, of the values. Raw ones are there in one piece, and again as they are compressed; a loss leaves
# the residual, and here its copy, as the model has running statistics.
MOST = {"raw": 2.05, "lossless": 1.55, "int8": 2.4, "int4": 2.3}


@pytest.mark.parametrize(("name", "most"), MOST.items(), ids=str)
def test_encoding_and_decoding_take_little_beside_the_values(name, most, update):
    reference, task = update
    num_bytes, data = task.patch.values.nbytes, []

    def encode():
        writer = None if name == "raw" else PatchWriter(encodings.find(name), SPEC, Key(1), reference)
        data.append(codec.encode(task, SPEC, writer=writer))

    encode()
    assert peak(encode) <= most * num_bytes
    assert data[0] == data[1]
    assert (
        peak(lambda: codec.decode(data[0], Task, SPEC, limit=LIMIT, reference=reference))
        <= num_bytes + WORKING_SPACE
    )


def repeated(item: bytes) -> bytes:
    """A body of many of these in one list."""
    count = codec.MAX_ELEMENTS - 10
    return b"\xdd" + count.to_bytes(4, "big") + item * count


BOMBS = {
    "a long text": b"\xdb" + (3_000_000).to_bytes(4, "big") + b"x" * 3_000_000,
    "long bytes": b"\xc6" + (3_000_000).to_bytes(4, "big") + b"x" * 3_000_000,
    "empty maps": repeated(b"\x80"),
    "texts": repeated(b"\xa5aaaaa"),
    "an unknown dtype": msgspec.msgpack.encode({"patch": ["f2", [10**6], b"\0" * 2_000_000]}),
    "an array in an unknown place": msgspec.msgpack.encode({"x": ["i8", [SPEC.size], b"\0" * 8 * SPEC.size]}),
    "many unknown encoded values": msgspec.msgpack.encode(
        {str(n): ["sparse", [10**6], b"\0" * 200_000] for n in range(20)}
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_few_bytes_take_a_few_hundred_kilobytes_beside_arrays(name):
    packet = forged(BOMBS[name], SPEC)
    assert len(packet) < 5_000
    arrays = 8 * SPEC.size if name == "an array in an unknown place" else 0

    def read():
        with pytest.raises(PacketError):
            codec.decode(packet, Task, SPEC, limit=LIMIT)

    assert peak(read) <= arrays + 700_000


def body_of_task(**changes) -> dict[str, object]:
    patch = {"selection": {"type": "Everything"}, "values": ["lossless", [SPEC.num_parameters], b"\0" * 8]}
    return {"patch": patch | changes}


@pytest.mark.parametrize(
    "values",
    [
        ["f4", [1], msgspec.msgpack.Ext(0x46, b"\0\0\0\0")],
        ["f4", [1], msgspec.msgpack.Ext(0x46, b"\0" * 16)],
        msgspec.msgpack.Ext(0x46, b"\0\0\0"),
    ],
)
def test_what_stands_for_an_array_in_here_is_refused_from_outside(values):
    with pytest.raises(PacketCorrupt, match="extension"):
        codec.decode(
            forged(msgspec.msgpack.encode(body_of_task(values=values)), SPEC), Task, SPEC, limit=LIMIT
        )


def test_encoded_values_longer_than_any_are_refused_before_they_are_unpacked():
    long = body_of_task(values=["sparse", [SPEC.num_parameters], b"\0" * 3_000_000])
    packet = forged(msgspec.msgpack.encode(long), SPEC)

    def read():
        with pytest.raises(PacketTooLarge):
            codec.decode(packet, Task, SPEC, limit=LIMIT)

    assert peak(read) <= 700_000


@dataclass(frozen=True)
class Several:
    first: Patch
    second: Patch
    table: FlatArray


def test_patches_are_read_in_whatever_order_a_peer_wrote_them(update):
    reference, task = update
    message = Several(task.patch, task.patch, np.arange(5, dtype=np.float32))
    writer = PatchWriter(encodings.find("lossless"), SPEC, Key(1), reference)
    plain = msgspec.msgpack.decode(body_of(codec.encode(message, SPEC, writer=writer)))
    turned = {name: plain[name] for name in ("table", "second", "first")}
    turned["second"] = dict(reversed(turned["second"].items()))
    back = codec.decode(
        forged(msgspec.msgpack.encode(turned), SPEC), Several, SPEC, limit=LIMIT, reference=reference
    )
    for patch in (back.first, back.second):
        assert patch.values.tobytes() == task.patch.values.tobytes()
    assert back.table.tolist() == [0, 1, 2, 3, 4]
    assert back.table.flags.writeable


def test_a_checksum_is_held_against_the_bytes_unless_the_caller_has_done_so(weights, spec):
    packet = bytearray(codec.encode(SharedModel(weights), spec))
    packet[24] ^= 1  # of the checksum
    with pytest.raises(PacketTruncated):
        codec.decode(bytes(packet), SharedModel, spec)
    back = codec.decode(bytes(packet), SharedModel, spec, verified=True)
    assert back.weights.tobytes() == weights.tobytes()
    for end in range(32, len(packet)):
        with pytest.raises(PacketError):
            codec.decode(bytes(packet[:end]), SharedModel, spec, verified=True)
