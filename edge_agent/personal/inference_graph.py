"""A personal model as an ONNX file that an app runs by itself: raw samples in, probabilities out."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.training.onnx_sessions import runtime
from fleetune.protocols.bundle.bundle import ANSWER, Bundle
from fleetune.protocols.bundle.graph import Constant, Dimension, Graph, Node, Port
from fleetune.protocols.errors import DataError, ModelError
from fleetune.protocols.model.backbone_file import Tensors
from fleetune.protocols.model.input_scaling import as_floats, over_channels
from fleetune.protocols.model.spec import FlatArray

INPUT, LOGITS, PROBABILITIES, LABEL = "input", "logits", "probabilities", "label"
_BATCH_SIZE = 128


def inference_graph(bundle: Bundle) -> Graph:
    """Make the graph from raw samples (bytes of images as 0..1) to logits, probabilities and the likeliest
    label.
    """
    answer = bundle.graphs[ANSWER].keeping({LOGITS})
    (x,) = (port for port in answer.inputs if port.name == "x")
    first, constants = _normalisation(bundle)
    each: tuple[Dimension, ...] = ("n",)
    classes = (*each, bundle.spec.num_classes)
    return Graph(
        inputs=(*(port for port in answer.inputs if port is not x), replace(x, name=INPUT)),
        outputs=(Port(LOGITS, "f4", classes), Port(PROBABILITIES, "f4", classes), Port(LABEL, "i8", each)),
        nodes=(
            *first,
            *answer.nodes,
            Node("Softmax", (LOGITS,), (PROBABILITIES,), {"axis": 1}),
            Node("ArgMax", (LOGITS,), (LABEL,), {"axis": 1, "keepdims": 0}),
        ),
        constants=(*answer.constants, *constants),
    )


def _normalisation(bundle: Bundle) -> tuple[tuple[Node, ...], tuple[Constant, ...]]:
    """The nodes that make the model's `x` of the input, as `edge_agent.training.device_data` does."""
    if bundle.input_type != "f4" or (bundle.mean, bundle.std) == (0.0, 1.0):
        return (Node("Identity", (INPUT,), ("x",), {}),), ()
    centred = Node("Sub", (INPUT, "input:mean"), ("input:centred",), {})
    scaled = Node("Div", ("input:centred", "input:std"), ("x",), {})
    constants = (
        Constant("input:mean", over_channels(bundle.mean, bundle.spec.input_shape)),
        Constant("input:std", over_channels(bundle.std, bundle.spec.input_shape)),
    )
    return (centred, scaled), constants


def write_inference(
    bundle: Bundle, weights: FlatArray, about: Mapping[str, str], frozen: Tensors = MappingProxyType({})
) -> bytes:
    """Make the ONNX file of a model with these weights, shape (spec.size,), and its `frozen` tensors.

    Its metadata holds `about` and the class names as JSON.
    """
    from fleetune.protocols.bundle.onnx_file import write_onnx

    tensors = {**frozen, **{tensor.name: view for tensor, view in bundle.spec.views(weights)}}
    graph = inference_graph(bundle)
    used = {port.name for port in graph.inputs}
    names = json.dumps(list(bundle.class_names), ensure_ascii=False)
    kept = {name: view for name, view in tensors.items() if name in used}
    return write_onnx(graph, weights=kept, about={**about, "class_names": names})


@dataclass(frozen=True)
class Predictor:
    """Runs an ONNX file that `write_inference` made.

    Attributes:
        session: of ONNX Runtime.
        class_names: of the labels; empty: they have none.
        input_shape: of one sample.
    """

    session: Any
    class_names: tuple[str, ...]
    input_shape: tuple[int, ...]

    @classmethod
    def of(cls, model: bytes | Path) -> "Predictor":
        """Open a file.

        Raises:
            ModelError: there is no such file, it is no such model, or ONNX Runtime is not installed.
        """
        onnxruntime = runtime()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 4
        try:
            data = model if isinstance(model, bytes) else model.read_bytes()
            session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
            about = session.get_modelmeta().custom_metadata_map
            (given,) = session.get_inputs()
            names = tuple(json.loads(about["class_names"]))
        except OSError as problem:
            raise ModelError(f"cannot read {model!s}: {problem.strerror}") from None
        except Exception as problem:  # each of the runtime's errors is a type of its own
            raise ModelError(f"this is no model that edge-agent export wrote: {problem!s:.200}") from problem
        return cls(session, names, tuple(given.shape[1:]))

    def probabilities(self, x: NDArray[np.generic]) -> NDArray[np.float32]:
        """The probability of each class for each sample, shape (n, classes).

        Args:
            x: raw samples, shape (n, *input_shape): bytes, or numbers as the device was trained on.

        Raises:
            DataError: they are of another shape.
        """
        if x.shape[1:] != self.input_shape and (1, *x.shape[1:]) != self.input_shape:
            raise DataError(f"samples have shape {x.shape[1:]}; the model takes {self.input_shape}")
        x = x.reshape(len(x), *self.input_shape)
        (given,) = self.session.get_inputs()
        kind = np.int64 if given.type == "tensor(int64)" else np.float32
        found = [self._batch(x[start : start + _BATCH_SIZE], kind) for start in range(0, len(x), _BATCH_SIZE)]
        return np.concatenate(found)

    def _batch(self, x: NDArray[np.generic], kind: type[np.generic]) -> NDArray[np.float32]:
        numbers = as_floats(x) if kind is np.float32 else x.astype(kind)
        (found,) = self.session.run([PROBABILITIES], {INPUT: numbers})
        array: NDArray[np.float32] = found
        return array

    def name(self, label: int) -> str:
        """The name of a class."""
        return self.class_names[label] if self.class_names else str(label)
