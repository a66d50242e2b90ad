"""Writes a `Graph` as an ONNX file without the `onnx` package; only three kinds of protobuf field are needed.

The `onnx` package would take 20 MB of disk and as much memory on every device.
Field numbers: onnx/onnx.proto (opset 17 has IR version 8).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.bundle.graph import OPSET, Attribute, Body, Graph, Node, Port
from fleetune.protocols.bundle.protobuf import binary, message, number, real, text

IR_VERSION = 8
ELEMENTS = {"f4": 1, "i8": 7, "?": 9}  # TensorProto.DataType
INT8, SCALE = ":int8", ":scale"  # endings of the two arrays that replace a quantised input
_INT8_ELEMENT = 3
_FLOAT, _INT, _STRING, _GRAPH, _FLOATS, _INTS = 1, 2, 3, 5, 6, 7  # AttributeProto.AttributeType
_DTYPES = {np.dtype(np.float32): 1, np.dtype(np.int64): 7, np.dtype(np.bool_): 9}


def write_onnx(
    graph: Graph,
    *,
    weights: Mapping[str, NDArray[np.float32]] | None = None,
    about: Mapping[str, str] | None = None,
    dequantised: Collection[str] = (),
) -> bytes:
    """Return the bytes of an ONNX model.

    Args:
        graph: the computation.
        weights: inputs that become part of the model, by name.
        about: entries of the model's metadata.
        dequantised: inputs that are given as two arrays: <name>:int8 of their shape, and <name>:scale,
            float32, one number for each index of the first axis. The input is their product.
    """
    weights = weights or {}
    scaled = [port.name for port in graph.inputs if port.name in dequantised]
    body = [message(1, _node(_dequantise(name))) for name in scaled]
    body += [message(1, _node(node)) for node in graph.nodes]
    body.append(text(2, "fleetune"))
    body += [message(5, _tensor(constant.name, constant.value)) for constant in graph.constants]
    body += [message(5, _tensor(name, value)) for name, value in weights.items()]
    inputs = [one for port in graph.inputs for one in ports_of(port, dequantised)]
    body += [message(11, _port(port)) for port in inputs if port.name not in weights]
    body += [message(12, _port(port)) for port in graph.outputs]
    model = [number(1, IR_VERSION), text(2, "fleetune")]
    model.append(message(8, [text(1, ""), number(2, OPSET)]))
    model.append(message(7, body))
    model += [message(14, [text(1, key), text(2, value)]) for key, value in (about or {}).items()]
    return b"".join(model)


def ports_of(port: Port, dequantised: Collection[str]) -> Iterator[Port]:
    """Yield the arrays that are given for one input of a graph, see `write_onnx`."""
    if port.name not in dequantised:
        yield port
        return
    yield replace(port, name=f"{port.name}{INT8}")
    yield replace(port, name=f"{port.name}{SCALE}", shape=port.shape[:1])


def _dequantise(name: str) -> Node:
    return Node("DequantizeLinear", (f"{name}{INT8}", f"{name}{SCALE}"), (name,), {"axis": 0})


def _node(node: Node) -> Iterable[bytes]:
    if isinstance(node.body, Body):
        yield from _scan(node, node.body)
        return
    yield from (text(1, name) for name in node.inputs)
    yield from (text(2, name) for name in node.outputs)
    yield text(4, node.op)
    yield from (message(5, _attribute(name, value)) for name, value in node.attributes.items())


def _scan(node: Node, body: Body) -> Iterable[bytes]:
    """Return ONNX's form of a Scan: its body reads the arrays that each step gets whole from around it."""
    states, scanned = (int(node.attributes[name]) for name in ("states", "scanned"))  # type: ignore[arg-type]
    own, start = states + scanned, f"{node.outputs[0]}/"  # ONNX wants names that are unique in the model
    names = dict(zip(body.inputs[own:], node.inputs[own:], strict=True)) | {"": ""}

    def named(arrays: Iterable[str]) -> tuple[str, ...]:
        return tuple(names.get(one, f"{start}{one}") for one in arrays)

    parts = [
        message(1, _node(replace(one, inputs=named(one.inputs), outputs=named(one.outputs))))
        for one in body.nodes
    ]
    parts.append(text(2, "step"))
    parts += [message(11, _array(name)) for name in named(body.inputs[:own])]
    parts += [message(12, _array(name)) for name in named(body.outputs)]
    directions = int(node.attributes.get("reverse", 0))  # type: ignore[arg-type]
    yield from _node(
        Node(
            node.op,
            node.inputs[:own],
            node.outputs,
            {
                "num_scan_inputs": scanned,
                "scan_input_directions": (directions,) * scanned,
                "scan_output_directions": (directions,) * (len(node.outputs) - states),
            },
        )
    )
    yield message(5, [text(1, "body"), message(6, parts), number(20, _GRAPH)])


def _array(name: str) -> Iterable[bytes]:
    """Return the fields of a float32 array whose shape the runtime finds."""
    yield text(1, name)
    yield message(2, [message(1, [number(1, ELEMENTS["f4"])])])


def _attribute(name: str, value: Attribute) -> Iterable[bytes]:
    yield text(1, name)
    match value:
        case int():
            yield number(3, value) + number(20, _INT)
        case float():
            yield real(2, value) + number(20, _FLOAT)
        case str():
            yield text(4, value) + number(20, _STRING)
        case _ if all(isinstance(one, int) for one in value):
            yield from (number(8, int(one)) for one in value)
            yield number(20, _INTS)
        case _:
            yield from (real(7, one) for one in value)
            yield number(20, _FLOATS)


def _tensor(name: str, value: NDArray[Any]) -> Iterable[bytes]:
    yield from (number(1, size) for size in value.shape)
    yield number(2, _DTYPES[value.dtype])
    yield text(8, name)
    yield binary(9, np.ascontiguousarray(value).tobytes())


def _port(port: Port) -> Iterable[bytes]:
    dimensions = [
        message(1, [number(1, size) if isinstance(size, int) else text(2, size)]) for size in port.shape
    ]
    element = _INT8_ELEMENT if port.name.endswith(INT8) else ELEMENTS[port.type]
    tensor = [number(1, element), message(2, dimensions)]
    yield text(1, port.name)
    yield message(2, [message(1, tensor)])
