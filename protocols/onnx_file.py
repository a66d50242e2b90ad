"""A `Graph` as an ONNX file, written by hand: what protobuf needs for it is three kinds of field.

The `onnx` package would do it too, with 20 MB on disk and as many in memory on every device.
Field numbers: onnx/onnx.proto (opset 17 has IR version 8).
"""

import struct
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocols.graph import OPSET, Attribute, Graph, Node, Port

IR_VERSION = 8
ELEMENTS = {"f4": 1, "i8": 7, "?": 9}  # TensorProto.DataType
_FLOAT, _INT, _STRING, _FLOATS, _INTS = 1, 2, 3, 6, 7  # AttributeProto.AttributeType
_DTYPES = {np.dtype(np.float32): 1, np.dtype(np.int64): 7, np.dtype(np.bool_): 9}


def write_onnx(
    graph: Graph,
    *,
    weights: Mapping[str, NDArray[np.float32]] | None = None,
    about: Mapping[str, str] | None = None,
) -> bytes:
    """The bytes of an ONNX model.

    Args:
        graph: what it computes.
        weights: inputs that become part of the model, by name.
        about: for the model's metadata.
    """
    weights = weights or {}
    body = [_message(1, _node(node)) for node in graph.nodes]
    body.append(_text(2, "fleetune"))
    body += [_message(5, _tensor(constant.name, constant.value)) for constant in graph.constants]
    body += [_message(5, _tensor(name, value)) for name, value in weights.items()]
    body += [_message(11, _port(port)) for port in graph.inputs if port.name not in weights]
    body += [_message(12, _port(port)) for port in graph.outputs]
    model = [_number(1, IR_VERSION), _text(2, "fleetune")]
    model.append(_message(8, [_text(1, ""), _number(2, OPSET)]))
    model.append(_message(7, body))
    model += [_message(14, [_text(1, key), _text(2, value)]) for key, value in (about or {}).items()]
    return b"".join(model)


def _node(node: Node) -> Iterable[bytes]:
    yield from (_text(1, name) for name in node.inputs)
    yield from (_text(2, name) for name in node.outputs)
    yield _text(4, node.op)
    yield from (_message(5, _attribute(name, value)) for name, value in node.attributes.items())


def _attribute(name: str, value: Attribute) -> Iterable[bytes]:
    yield _text(1, name)
    match value:
        case int():
            yield _number(3, value) + _number(20, _INT)
        case float():
            yield _float(2, value) + _number(20, _FLOAT)
        case str():
            yield _text(4, value) + _number(20, _STRING)
        case _ if all(isinstance(one, int) for one in value):
            yield from (_number(8, int(one)) for one in value)
            yield _number(20, _INTS)
        case _:
            yield from (_float(7, one) for one in value)
            yield _number(20, _FLOATS)


def _tensor(name: str, value: NDArray[Any]) -> Iterable[bytes]:
    yield from (_number(1, size) for size in value.shape)
    yield _number(2, _DTYPES[value.dtype])
    yield _text(8, name)
    yield _bytes(9, np.ascontiguousarray(value).tobytes())


def _port(port: Port) -> Iterable[bytes]:
    dimensions = [
        _message(1, [_number(1, size) if isinstance(size, int) else _text(2, size)]) for size in port.shape
    ]
    tensor = [_number(1, ELEMENTS[port.type]), _message(2, dimensions)]
    yield _text(1, port.name)
    yield _message(2, [_message(1, tensor)])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value & (1 << 64) - 1)


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode())


def _message(field: int, parts: Iterable[bytes]) -> bytes:
    return _bytes(field, b"".join(parts))


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
