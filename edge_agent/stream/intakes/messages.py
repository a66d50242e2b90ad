"""Messages of sensors' programs, and the answers to them, as bytes.

A message is one line of JSON, or MessagePack after its length (4 bytes, big endian). `x` is a sample's input:
lists of numbers, or bytes with `dtype` (u1 or f4, little endian) and `shape`. `y` is its label, and `id` its
name. A message with only `id` and `y` labels a sample. Answers come in the same form and order. They have
`ok`, and either `what` became of the sample or the `problem`. `again` means that the disk was full: send the
message again.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from fleetune.edge_agent.stream.sample import (
    MAX_NAME,
    BadSample,
    Label,
    Sample,
    make_label,
    make_name,
    make_sample,
)
from fleetune.edge_agent.stream.sample_store import Outcome, SampleStore
from fleetune.protocols.errors import StoreError
from fleetune.protocols.one_line import flat

MAX_MESSAGE_BYTES = 2**22
MAX_LISTS = 2**17  # in JSON, where a list of two bytes takes up to 80 bytes of memory
MAX_LISTED_BYTES = 2**19  # in MessagePack without `x` as bytes: a list may be one byte there
_MOST_AXES = 8
_BYTES = {b"\xc4", b"\xc5", b"\xc6"}  # first byte of a value of bytes in MessagePack
_KINDS: dict[str, np.dtype[Any]] = {"u1": np.dtype(np.uint8), "f4": np.dtype("<f4")}


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """A message of a sensor's program."""

    id: str | int | None = None
    x: Any = None
    y: Any = None
    dtype: str | None = None
    shape: list[int] | None = None


class Answer(msgspec.Struct, omit_defaults=True):
    """The answer to a message."""

    ok: bool
    id: str | int | None = None
    what: Outcome | None = None
    problem: str | None = None
    again: bool = False


@dataclass
class ParsedMessage:
    """A decoded message: a sample, a label for the sample `id`, or the problem with it."""

    as_json: bool
    id: str | int | None = None
    sample: Sample | None = None
    label: Label | None = None
    problem: BadSample | None = None


def answer_to(one: ParsedMessage, outcome: Outcome | None, failed: StoreError | None) -> Answer:
    if one.problem is not None:
        return Answer(False, one.id, problem=str(one.problem))
    if outcome is None:
        return Answer(False, one.id, problem=str(failed), again=True)
    problem = "it was refused; the agent's log says why" if outcome == "refused" else None
    return Answer(outcome != "refused", one.id, outcome, problem)


def store_messages(store: SampleStore, messages: Sequence[ParsedMessage]) -> list[Outcome | None]:
    """Store the samples and labels of messages in one transaction.

    Returns:
        What became of each message's sample or label; None: it has neither.

    Raises:
        StoreError: the store cannot be written; nothing was stored.
    """
    samples = [one.sample for one in messages if one.sample is not None]
    labels = [(str(one.id), one.label) for one in messages if one.label is not None]
    outcomes = store.add(samples, labels) if samples or labels else []
    of_samples, of_labels = iter(outcomes[: len(samples)]), iter(outcomes[len(samples) :])
    return [
        next(of_samples) if one.sample is not None else next(of_labels) if one.label is not None else None
        for one in messages
    ]


def first_message(received: bytearray) -> tuple[int, int, bool] | None:
    """Find the first message in received bytes.

    Returns:
        Start and end of its content, and True if it is JSON; None: it is not complete yet.

    Raises:
        BadSample: it is too long, or neither JSON nor MessagePack.
    """
    if not received:
        return None
    if received[0] in b"{ \t\r\n":
        end = received.find(b"\n", 0, MAX_MESSAGE_BYTES + 1)
        if end < 0 and len(received) > MAX_MESSAGE_BYTES:
            raise BadSample("message", f"a line has more than {MAX_MESSAGE_BYTES} bytes; split the message")
        return None if end < 0 else (0, end, True)
    if received[0] > MAX_MESSAGE_BYTES >> 24:  # an allowed length never begins so
        raise BadSample("message", "a message is neither a line of JSON nor MessagePack after its length")
    if len(received) < 4:
        return None
    end = 4 + int.from_bytes(received[:4], "big")
    if end > MAX_MESSAGE_BYTES:
        raise BadSample(
            "message", f"a message has {end - 4} bytes; at most {MAX_MESSAGE_BYTES - 4} are allowed"
        )
    return (4, end, False) if len(received) >= end else None


def read_message(content: bytes, *, as_json: bool) -> ParsedMessage:
    decode = msgspec.json.decode if as_json else msgspec.msgpack.decode
    name: str | int | None = None
    try:
        _check_lists(content, as_json=as_json)
        message = decode(content, type=Message)
        name = message.id if len(str(message.id)) <= MAX_NAME else None
        if message.x is not None:
            sample = make_sample(_array(message), message.y, name)
            return ParsedMessage(as_json, name, sample=sample)
        if name is None or message.y is None:
            return ParsedMessage(
                as_json, name, problem=BadSample("message", "a message needs x, or id and y")
            )
        return ParsedMessage(as_json, make_name(name), label=make_label(message.y))
    except BadSample as problem:
        return ParsedMessage(as_json, name, problem=problem)
    except (msgspec.DecodeError, ValueError, RecursionError) as problem:
        words = f"no message ({flat(problem)[:100]})"
        return ParsedMessage(as_json, name, problem=BadSample("message", words))


class _Parts(msgspec.Struct):
    """The field of a message that may be long, not decoded."""

    x: msgspec.Raw = msgspec.Raw()


def _check_lists(content: bytes, *, as_json: bool) -> None:
    """Raise BadSample if the lists of a message would take far more memory than its bytes."""
    if as_json:
        num_lists = content.count(b"[") + content.count(b"{")
        if num_lists > MAX_LISTS:
            raise BadSample("message", f"a message has {num_lists} lists; at most {MAX_LISTS} are allowed")
        return
    x = bytes(msgspec.msgpack.decode(content, type=_Parts).x)
    listed = len(content) - (len(x) if x[:1] in _BYTES else 0)
    if listed > MAX_LISTED_BYTES:
        words = (
            f"a message has {listed} bytes of lists; at most {MAX_LISTED_BYTES}: send x as"
            " bytes, with dtype and shape"
        )
        raise BadSample("message", words)


def _array(message: Message) -> Any:
    """The input of a message, with bytes converted to an array."""
    if not isinstance(message.x, bytes):
        are_bytes = message.dtype == "u1" and _are_bytes(message.x)
        return np.asarray(message.x, np.uint8) if are_bytes else message.x
    kind, shape = _KINDS.get(message.dtype or ""), message.shape or []
    if kind is None or not 0 < len(shape) <= _MOST_AXES or min(shape) < 1:
        raise BadSample("message", "x as bytes needs dtype (u1 or f4) and shape")
    if math.prod(shape) * kind.itemsize != len(message.x):
        raise BadSample("message", f"x has {len(message.x)} bytes, which do not match its shape {shape}")
    return np.frombuffer(message.x, kind).reshape(shape)


def _are_bytes(x: Any) -> bool:
    found = np.asarray(x)
    return bool(found.dtype.kind in "bui" and found.size and found.min() >= 0 and found.max() <= 255)
