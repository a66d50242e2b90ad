"""The part of a bundle for onnxruntime-training, and how a device cuts it down.

The file TRAINING_MODEL holds the forward pass, the loss and the gradients of all parameters, as the package's
Module expects. Its inputs are those of the user (x, y, statistics, noise:<k>), the parameters by name, a
buffer for each gradient, and the flag that clears the buffers. Its outputs are those of the user (loss,
statistic:<tensor>) and a flag for each buffer. The checkpoint that a Module starts from holds only names and
shapes, so a device makes it from the spec. A device that needs few gradients removes the others with `cut`.

Field numbers: onnx/onnx.proto. Names of buffers and flags: onnxruntime-training 1.19.2.
"""

from collections.abc import Collection, Iterable

from fleetune.protocols.bundle.protobuf import Field, fields, message, number, text, texts
from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.model.spec import TensorSpec

TRAINING_MODEL = "training_model.onnx"
RESET = "lazy_reset_grad"

_GRAPH = 7  # field of a model
_NODE, _INITIALIZER, _INPUT, _OUTPUT, _VALUE_INFO = 1, 5, 11, 12, 13  # fields of a graph
_SPARSE_INITIALIZER, _ATTRIBUTE = 15, 5  # fields of a graph and of a node
# fields of an attribute; sparse tensors are treated like graphs
_HOLDS_GRAPHS, _HOLDS_TENSORS = {6, 11, 22, 23}, {5, 10}
_NAMES_FILES = {13, 14}  # fields of a tensor that refer to files
_NEVER_IN_A_MODEL = {20, 25}
# an integer modulo zero ends the process; MaxUnpool does not check its positions
_UNSAFE = {"Mod", "MaxUnpool"}
_FLOAT32 = 1


def gradient(tensor: str) -> str:
    """Return the name of a parameter's gradient."""
    return f"{tensor}_grad"


def gradient_buffer(tensor: str) -> str:
    """Return the name of the input to which a parameter's gradient is added."""
    return f"{gradient(tensor)}.accumulation.buffer"


def gradient_flag(tensor: str) -> str:
    """Return the name of the output that confirms that a parameter's gradient was added."""
    return f"{gradient(tensor)}.accumulation.out"


def declaration(tensor: TensorSpec) -> bytes:
    """Return a parameter as a TensorProto without values, as the checkpoint contains it."""
    dimensions = b"".join(number(1, size) for size in tensor.shape)
    return dimensions + number(2, _FLOAT32) + text(8, tensor.name)


def cut(model: bytes, outputs: Collection[str]) -> bytes:
    """Return an ONNX model reduced to these outputs, in this order, and the nodes that they depend on.

    Raises:
        PacketCorrupt: it is no ONNX model, lacks an output, or contains something that no training model has:
            functions, graphs in nodes (loops and branches), names of files.
        PacketTooLarge: it has too many fields.
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
    wanted, message_parts = set(outputs), []
    for part in reversed(parts):
        if part.number == _NODE and not wanted.isdisjoint(texts(part.value, 2)):
            wanted.update(texts(part.value, 1))
            message_parts.append(part)
    yield from (message(_NODE, _unburdened(part.value, wanted)) for part in reversed(message_parts))
    yield from (part.whole for part in parts if _stays(part, wanted))
    yield from (made[name] for name in outputs)


def _check_part(part: Field) -> None:
    """Check that a part of a graph refers neither to a file nor to another graph."""
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
    """True if a part of a graph that is neither node nor output is still needed."""
    name = {_NODE: 0, _OUTPUT: 0, _INITIALIZER: 8, _INPUT: 1, _VALUE_INFO: 1}.get(part.number)
    return name is None or not wanted.isdisjoint(texts(part.value, name))


def _unburdened(node: bytes, wanted: Collection[str]) -> Iterable[bytes]:
    """Return the fields of a node, without an unneeded gradient.

    A convolution's backward node computes the gradients of its input and of its weights. The input's gradient
    is dropped if nothing needs it.
    """
    first = texts(node, 2)[0]
    spare = text(2, first) if texts(node, 4) == ["ConvGrad"] and first not in wanted else None
    for part in fields(node):
        yield text(2, "") if part.whole == spare else part.whole
