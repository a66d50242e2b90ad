"""Reads messages of sensor programs, in JSON or MessagePack: a sample, or a label for an earlier sample.

`x` is a sample's input: lists of numbers, or bytes with `dtype` (u1 or f4, little endian) and `shape`. `y` is
its label, and `id` its name. A message with only `id` and `y` labels the sample of that name.
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
from fleetune.protocols.one_line import flat

MAX_MESSAGE_BYTES = 2**22
MAX_LISTS = 2**17  # in JSON, where a list of two bytes takes up to 80 bytes of memory
MAX_LISTED_BYTES = 2**19  # in MessagePack without `x` as bytes: a list may be one byte there
_MOST_AXES = 8
_BYTES = {b"\xc4", b"\xc5", b"\xc6"}  # first byte of a value of bytes in MessagePack
_KINDS: dict[str, np.dtype[Any]] = {"u1": np.dtype(np.uint8), "f4": np.dtype("<f4")}


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of a message, before they are checked."""

    id: str | int | None = None
    x: Any = None
    y: Any = None
    dtype: str | None = None
    shape: list[int] | None = None


@dataclass
class ParsedMessage:
    """A decoded message: a sample, a label for the sample `id`, or the message's problem."""

    id: str | int | None = None
    sample: Sample | None = None
    label: Label | None = None
    problem: BadSample | None = None


def store_messages(store: SampleStore, messages: Sequence[ParsedMessage]) -> list[Outcome | None]:
    """Store the samples and labels of messages in one transaction.

    Returns:
        The outcome for each message's sample or label; None for a message with neither.

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


def read_message(content: bytes, *, as_json: bool) -> ParsedMessage:
    """Decode a message; an invalid message gives a `ParsedMessage` with a problem."""
    decode = msgspec.json.decode if as_json else msgspec.msgpack.decode
    name: str | int | None = None
    try:
        check_lists(content, as_json=as_json)
        message = decode(content, type=Message)
        name = message.id if len(str(message.id)) <= MAX_NAME else None
        if message.x is not None:
            sample = make_sample(_array(message), message.y, name)
            return ParsedMessage(name, sample=sample)
        if name is None or message.y is None:
            words = "a message lacks x; send x for a sample, or id and y for a label"
            return ParsedMessage(name, problem=BadSample("message", words))
        return ParsedMessage(make_name(name), label=make_label(message.y))
    except BadSample as problem:
        return ParsedMessage(name, problem=problem)
    except (msgspec.DecodeError, ValueError, RecursionError) as problem:
        form = "JSON" if as_json else "MessagePack"
        words = f"a message is not valid {form} ({flat(problem)[:100]}); docs/streams.md shows one"
        return ParsedMessage(name, problem=BadSample("message", words))


class _Parts(msgspec.Struct):
    """A message whose long field is not decoded."""

    x: msgspec.Raw = msgspec.Raw()


def check_lists(content: bytes, *, as_json: bool) -> None:
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
    """Return the input of a message, with bytes converted to an array."""
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
