"""What a bundle holds for onnxruntime-training, and how little of it a device needs.

One file, TRAINING_MODEL: the forward pass, the loss and the gradients of all parameters, as the package's
Module wants it. Its inputs are the user's (x, y, statistics, noise:<k>), the parameters by name, a buffer for
each gradient and the flag that clears the buffers; its outputs are the user's (loss, statistic:<tensor>) and
a flag for each buffer. The checkpoint that a Module starts from has only names and shapes, and a device makes
it from the spec. So a device can have any set of gradients: `cut` leaves the others out.

Field numbers: onnx/onnx.proto. Names of buffers and flags: onnxruntime-training 1.19.2.
"""

from collections.abc import Collection, Iterable

from fleetune.protocols.bundle.protobuf import Field, fields, message, number, text, texts
from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.model.spec import TensorSpec

TRAINING_MODEL = "training_model.onnx"
RESET = "lazy_reset_grad"

_GRAPH = 7  # of a model
_NODE, _INITIALIZER, _INPUT, _OUTPUT, _VALUE_INFO = 1, 5, 11, 12, 13  # of a graph
_SPARSE_INITIALIZER, _ATTRIBUTE = 15, 5  # of a graph, of a node
_HOLDS_GRAPHS, _HOLDS_TENSORS = {6, 11, 22, 23}, {5, 10}  # of an attribute: sparse tensors count as graphs
_NAMES_FILES = {13, 14}  # of a tensor
_NEVER_IN_A_MODEL = {20, 25}
_UNSAFE = {"Mod", "MaxUnpool"}  # whole numbers modulo zero; places that are not looked at
_FLOAT32 = 1


def gradient(tensor: str) -> str:
    """The name of a parameter's gradient."""
    return f"{tensor}_grad"


def gradient_buffer(tensor: str) -> str:
    """The input that a parameter's gradient is added to."""
    return f"{gradient(tensor)}.accumulation.buffer"


def gradient_flag(tensor: str) -> str:
    """The output that tells that it was."""
    return f"{gradient(tensor)}.accumulation.out"


def declaration(tensor: TensorSpec) -> bytes:
    """A parameter as a TensorProto without values, as a checkpoint without values is made of."""
    dimensions = b"".join(number(1, size) for size in tensor.shape)
    return dimensions + number(2, _FLOAT32) + text(8, tensor.name)


def cut(model: bytes, outputs: Collection[str]) -> bytes:
    """An ONNX model with only these outputs, in this order, and what they depend on.

    Raises:
        PacketCorrupt: it is no ONNX model, lacks an output, or holds what no training model has: functions,
            graphs in nodes (loops and branches), names of files.
        PacketTooLarge: it has too many parts.
    """
    parts = list(fields(model))
    if {part.number for part in parts} & _NEVER_IN_A_MODEL:
        raise PacketCorrupt("training model has functions or a training graph of its own")
    graph = b"".join(part.value for part in parts if part.number == _GRAPH)
    others = b"".join(part.whole for part in parts if part.number != _GRAPH)
    return others + message(_GRAPH, _cut_graph(list(fields(graph)), outputs))


def _cut_graph(parts: list[Field], outputs: Collection[str]) -> Iterable[bytes]:
    made = {name: part.whole for part in parts if part.number == _OUTPUT for name in texts(part.value, 1)}
    if missing := [name for name in outputs if name not in made]:
        raise PacketCorrupt(f"training model has no output {missing[0]!r}")
    for part in parts:
        _check_part(part)
    wanted, kept = set(outputs), []
    for part in reversed(parts):
        if part.number == _NODE and not wanted.isdisjoint(texts(part.value, 2)):
            wanted.update(texts(part.value, 1))
            kept.append(part)
    yield from (message(_NODE, _unburdened(part.value, wanted)) for part in reversed(kept))
    yield from (part.whole for part in parts if _stays(part, wanted))
    yield from (made[name] for name in outputs)


def _check_part(part: Field) -> None:
    """Nothing of a graph leads out of it, to a file or into another graph."""
    if part.number == _INITIALIZER:
        _check_tensor(part.value)
    elif part.number == _SPARSE_INITIALIZER:
        raise PacketCorrupt("training model has a sparse tensor")
    elif part.number == _NODE:
        if unsafe := _UNSAFE.intersection(texts(part.value, 4)):
            raise PacketCorrupt(f"training model has operator {min(unsafe)!r}, which may end the process")
        for attribute in fields(part.value):
            if attribute.number == _ATTRIBUTE:
                _check_attribute(attribute.value)


def _check_attribute(attribute: bytes) -> None:
    for one in fields(attribute):
        if one.number in _HOLDS_GRAPHS:
            raise PacketCorrupt("training model has a graph in a node: a loop or a branch")
        if one.number in _HOLDS_TENSORS:
            _check_tensor(one.value)


def _check_tensor(tensor: bytes) -> None:
    if {one.number for one in fields(tensor)} & _NAMES_FILES:
        raise PacketCorrupt("training model has a tensor in a file of its own")


def _stays(part: Field, wanted: set[str]) -> bool:
    """Whether a part of a graph that is neither node nor output is of use."""
    name = {_NODE: 0, _OUTPUT: 0, _INITIALIZER: 8, _INPUT: 1, _VALUE_INFO: 1}.get(part.number)
    return name is None or not wanted.isdisjoint(texts(part.value, name))


def _unburdened(node: bytes, wanted: Collection[str]) -> Iterable[bytes]:
    """A node's fields. A convolution's backward pass makes the gradients of its input and its weights in one
    node: the first is left out where nothing needs it.
    """
    first = texts(node, 2)[0]
    spare = text(2, first) if texts(node, 4) == ["ConvGrad"] and first not in wanted else None
    for part in fields(node):
        yield text(2, "") if part.whole == spare else part.whole
