"""Computes the size of a message as papers count it: full-width numbers, and one bit for each mask entry."""

from dataclasses import fields, is_dataclass

import msgspec
import numpy as np


def paper_bytes(message: object) -> float:
    """Return the bytes of all arrays in a task or update: 4 for a number, 1/8 for a boolean.

    Single numbers outside arrays do not count.
    """
    if isinstance(message, np.ndarray):
        return message.size / 8 if message.dtype == np.bool_ else 4.0 * message.size
    if isinstance(message, msgspec.Struct):
        return sum(paper_bytes(getattr(message, name)) for name in message.__struct_fields__)
    if is_dataclass(message):
        return sum(paper_bytes(getattr(message, field.name)) for field in fields(message))
    if isinstance(message, list | tuple):
        return sum(map(paper_bytes, message))
    return sum(map(paper_bytes, message.values())) if isinstance(message, dict) else 0.0
