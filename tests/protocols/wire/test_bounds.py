"""Whatever a peer can say has a bound: every number, text and collection of every message and payload."""

import importlib

import msgspec
import pytest
from msgspec import inspect
from tests.conftest import tiny_spec

from fleetune.protocols.bundle.bundle import Bundle
from fleetune.protocols.errors import PacketCorrupt, SettingError
from fleetune.protocols.methods import REGISTRY, create
from fleetune.protocols.wire import messages as wire
from fleetune.protocols.wire.payloads import Assignment, Enrolment, Reply

RUN, TRANSFER = "run-1", "0" * 32
ROUND_COST = {"bytes_down": 1}
REPORT = {"device": "a", "num_samples": 1}


def _methods():
    for target in REGISTRY.values():
        module, _, name = target.partition(":")
        yield getattr(importlib.import_module(module), name)


def _payloads():
    yield from (Enrolment, Bundle)
    for method in _methods():
        yield Reply[method.update_type]
        yield Assignment[method.task_type]


def _has_both_ends(kind):
    return not (kind.ge is kind.gt is None or kind.le is kind.lt is None)


def _unbounded(kind, path, inside=()):  # noqa: C901 - one branch a kind of type
    """Where a value of this type may be as large or as long as a peer likes."""
    match kind:
        case inspect.IntType() | inspect.FloatType() if not _has_both_ends(kind):
            yield path
        case inspect.StrType(max_length=None, pattern=None):
            yield path
        case inspect.StructType(cls=cls) | inspect.DataclassType(cls=cls) if cls not in inside:
            for field in kind.fields:
                yield from _unbounded(field.type, f"{path}.{field.name}", (*inside, cls))
        case inspect.UnionType(types=types) | inspect.TupleType(item_types=types):
            for one in types:
                yield from _unbounded(one, path, inside)
        case inspect.VarTupleType() | inspect.ListType() | inspect.DictType():
            if kind.max_length is None:
                yield path
            for name in ("item_type", "key_type", "value_type"):
                if hasattr(kind, name):
                    yield from _unbounded(getattr(kind, name), f"{path} {name}", inside)


@pytest.mark.parametrize("messages", [wire.FromDevice, wire.ToDevice], ids=["from device", "to device"])
def test_everything_in_a_message_is_bounded(messages):
    assert not sorted(set(_unbounded(inspect.type_info(messages), "message")))


def test_everything_in_a_payload_of_every_method_is_bounded():
    found = {
        path
        for kind in _payloads()
        for path in _unbounded(inspect.type_info(kind), getattr(kind, "__name__", "?"))
    }
    # 64-bit keys: msgspec knows no bound beyond int64, and MessagePack no greater number
    assert not {path for path in found if not path.endswith((".selection.key", ".selection.start"))}


@pytest.mark.parametrize(
    "said",
    [
        {"type": "Decline", "run": RUN, "round": 2**70, "attempt": 1, "reason": ""},
        {"type": "Measured", "run": RUN, "round": 2**40, "attempt": 1, "actual": ROUND_COST},
        {"type": "Measured", "run": RUN, "round": 1, "attempt": -1, "actual": ROUND_COST},
        {"type": "Working", "run": RUN, "round": 1, "stage": "training", "progress": 1e300},
        {"type": "Working", "run": f"{RUN}\n", "round": 1, "stage": "training"},
        {"type": "Resume", "transfer": TRANSFER, "offset": -1},
        {"type": "Ack", "transfer": "../../etc", "offset": 0},
        {"type": "Refuse", "transfer": TRANSFER, "reason": "x" * 1001},
        {"type": "Ready", "run": RUN, "model_hash": "?", "report": REPORT},
        {"type": "Ready", "run": RUN, "model_hash": "0" * 16, "report": {**REPORT, "round_s": -1}},
        {"type": "Ready", "run": RUN, "model_hash": "0" * 16, "report": {**REPORT, "device": "a/b"}},
        {"type": "Presence", "online": True, "instance": "x" * 101, "version": 1},
    ],
    ids=lambda said: said["type"],
)
def test_what_no_honest_device_says_is_refused(said):
    with pytest.raises(PacketCorrupt):
        wire.read_from_device(msgspec.json.encode(said) if said.get("round") != 2**70 else _huge(said))


def _huge(said):
    """Beyond what msgspec itself writes: 70 bits."""
    return msgspec.json.encode({**said, "round": 0}).replace(b'"round":0', b'"round":%d' % 2**70)


@pytest.mark.parametrize(
    "packet",
    [
        b'{"type":"Pong","nonce":' + b"[" * 16_000,
        b'{"type":"Offer","errand":{"kind":"update","run":"r","x":' + b"[" * 16_000,
        b'{"type":"Resume","transfer":"%s","offset":%s}' % (b"0" * 32, b"9" * 16_000),
        b'{"type":"Pong","nonce":"\xff"}',
        b'{"type":"Pong","nonce":"\\ud800"}',
        b"[" * 16_000,
    ],
    ids=["deep", "deep and unknown", "5000 digits", "no utf-8", "half a surrogate", "only brackets"],
)
def test_text_that_breaks_parsers_is_refused(packet):
    with pytest.raises(PacketCorrupt):
        wire.read_from_device(packet)


def test_a_setting_of_line_breaks_is_named_in_one_line():
    with pytest.raises(SettingError) as caught:
        create("fedavg", tiny_spec(), {"\n\n": 1})
    assert "\n" not in str(caught.value)
