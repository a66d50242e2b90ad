"""What a bundle holds for onnxruntime-training, and how little of it a device needs.

One file, TRAINING_MODEL: the forward pass, the loss and the gradients of all parameters, as the package's
Module wants it. Its inputs are the user's (x, y, statistics, noise:<k>), the parameters by name, a buffer for
each gradient and the flag that clears the buffers; its outputs are the user's (loss, statistic:<tensor>) and
a flag for each buffer. The checkpoint that a Module starts from has only names and shapes, and a device makes
it from the spec. So a device can have any set of gradients: `cut` leaves the others out.

Field numbers: onnx/onnx.proto. Names of buffers and flags: onnxruntime-training 1.19.2.
"""

from collections.abc import Collection, Iterable

from protocols.errors import PacketCorrupt
from protocols.model import TensorSpec
from protocols.protobuf import Field, fields, message, number, text, texts

TRAINING_MODEL = "training_model.onnx"
RESET = "lazy_reset_grad"

_GRAPH = 7  # of a model
_NODE, _INITIALIZER, _INPUT, _OUTPUT, _VALUE_INFO = 1, 5, 11, 12, 13  # of a graph
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
        PacketCorrupt: it is no ONNX model, or lacks an output.
    """
    parts = list(fields(model))
    graph = b"".join(part.value for part in parts if part.number == _GRAPH)
    others = b"".join(part.whole for part in parts if part.number != _GRAPH)
    return others + message(_GRAPH, _cut_graph(list(fields(graph)), outputs))


def _cut_graph(parts: list[Field], outputs: Collection[str]) -> Iterable[bytes]:
    made = {name: part.whole for part in parts if part.number == _OUTPUT for name in texts(part.value, 1)}
    if missing := [name for name in outputs if name not in made]:
        raise PacketCorrupt(f"training model has no output {missing[0]!r}")
    wanted, kept = set(outputs), []
    for part in reversed(parts):
        if part.number == _NODE and not wanted.isdisjoint(texts(part.value, 2)):
            wanted.update(texts(part.value, 1))
            kept.append(part)
    yield from (message(_NODE, _unburdened(part.value, wanted)) for part in reversed(kept))
    yield from (part.whole for part in parts if _stays(part, wanted))
    yield from (made[name] for name in outputs)


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
