"""A personal model as an ONNX file that an app can run alone, from raw samples to the task's answers."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from fleetune.edge_agent.personal.task_answers import JUDGED, LOGITS, PROBABILITIES, QUANTILES, answers_of
from fleetune.edge_agent.training.onnx_sessions import runtime
from fleetune.protocols.bundle.bundle import ANSWER, Bundle
from fleetune.protocols.bundle.graph import Constant, Graph, Node
from fleetune.protocols.errors import DataError, ModelError
from fleetune.protocols.input_files import read_input
from fleetune.protocols.model.backbone_file import Tensors
from fleetune.protocols.model.input_scaling import as_floats, over_channels
from fleetune.protocols.model.interface import Interface, ModelInput
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.settings.task import TaskSection
from fleetune.protocols.tasks import CLASSIFICATION, task_of
from fleetune.protocols.tasks.anomaly_threshold import FalseAlarms, Threshold
from fleetune.protocols.tasks.task import Task

INPUT = "input"
_BATCH_SIZE = 128


def inference_graph(bundle: Bundle, threshold: float | None = None) -> Graph:
    """Return the graph from raw samples to the answers in `edge_agent.personal.task_answers`.

    The graph scales the bytes of images to 0..1.

    Args:
        bundle: bundle of the model.
        threshold: anomaly threshold; None if not known.
    """
    answer = bundle.graphs[ANSWER].keeping({LOGITS})
    (x,) = (port for port in answer.inputs if port.name == "x")
    first, constants = _normalisation(bundle)
    last = answers_of(bundle.learns, bundle.spec.num_classes, threshold)
    return Graph(
        inputs=(*(port for port in answer.inputs if port is not x), replace(x, name=INPUT)),
        outputs=last.outputs,
        nodes=(*first, *answer.nodes, *last.nodes),
        constants=(*answer.constants, *constants, *last.constants),
    )


def _normalisation(bundle: Bundle) -> tuple[tuple[Node, ...], tuple[Constant, ...]]:
    """Return the nodes that scale the input to the model's `x`, as `edge_agent.training.device_data` does."""
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
    bundle: Bundle,
    weights: FlatArray,
    about: Mapping[str, str],
    frozen: Tensors = MappingProxyType({}),
    threshold: Threshold | None = None,
) -> bytes:
    """Return the ONNX file of a model with these weights, shape (spec.size,), and its `frozen` tensors.

    Its metadata hold `about` and, as JSON, the class names, the run's [task] if it has one, and the inputs in
    a row if the model has several. If they are known, they also hold the anomaly threshold and its rate of
    false alarms.
    """
    from fleetune.protocols.bundle.onnx_file import write_onnx

    tensors = {**frozen, **{tensor.name: view for tensor, view in bundle.spec.views(weights)}}
    graph = inference_graph(bundle, None if threshold is None else threshold.error)
    used = {port.name for port in graph.inputs}
    used_tensors = {name: view for name, view in tensors.items() if name in used}
    said = {**about, "class_names": json.dumps(list(bundle.class_names), ensure_ascii=False)}
    if bundle.spec.reads.inputs:
        said["inputs"] = msgspec.json.encode(bundle.spec.reads.inputs).decode()
    if bundle.task is not UNSET:
        said["task"] = msgspec.json.encode(bundle.task).decode()
    if threshold is not None:
        said["threshold"] = json.dumps(threshold.error)
        said["false_alarms"] = msgspec.json.encode(threshold.false_alarms).decode()
    return write_onnx(graph, weights=used_tensors, about=said)


def _read(path: Path) -> bytes:
    return read_input(path, error=lambda line: ModelError(f"cannot read {line}"))


@dataclass(frozen=True)
class Predictor:
    """Runs an ONNX file that `write_inference` made.

    Attributes:
        session: the ONNX Runtime session.
        class_names: names of the classes; empty if they have none.
        input_shape: shape of one sample.
        task: task that the model was trained for.
        threshold: a larger error marks an anomaly; None if not known, or if the task has no threshold.
        false_alarms: fraction of normal samples that the threshold marks as anomalies; None if not known.
        inputs: the inputs in a sample's row, if the model takes several.
    """

    session: Any
    class_names: tuple[str, ...]
    input_shape: tuple[int, ...]
    task: Task = CLASSIFICATION
    threshold: float | None = None
    false_alarms: FalseAlarms | None = None
    inputs: tuple[ModelInput, ...] = ()

    @classmethod
    def of(cls, model: bytes | Path) -> "Predictor":
        """Load a file.

        Raises:
            ModelError: there is no such file, it is no such model, or ONNX Runtime is not installed.
        """
        onnxruntime = runtime()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 4
        try:
            data = model if isinstance(model, bytes) else _read(model)
            session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
            about = session.get_modelmeta().custom_metadata_map
            (given,) = session.get_inputs()
            names = tuple(json.loads(about["class_names"]))
            task = task_of(msgspec.json.decode(about.get("task", "{}"), type=TaskSection))
            threshold = json.loads(about.get("threshold", "null"))
            inputs = msgspec.json.decode(about.get("inputs", "[]"), type=tuple[ModelInput, ...])
            alarms = msgspec.json.decode(about.get("false_alarms", "null"), type=FalseAlarms | None)
        except ModelError:
            raise
        except Exception as problem:  # ONNX Runtime's exceptions have no common base class
            raise ModelError(f"this is no model that edge-agent export wrote: {problem!s:.200}") from problem
        return cls(session, names, tuple(given.shape[1:]), task, threshold, alarms, inputs)

    def answers(self, x: NDArray[np.generic]) -> dict[str, NDArray[Any]]:
        """Return all outputs for each sample, by their names in `edge_agent.personal.task_answers`.

        Args:
            x: raw samples, shape (n, *input_shape): bytes, or numbers as in the device's training data.

        Returns:
            Arrays of shape (n, ...).

        Raises:
            DataError: the samples have another shape.
        """
        if x.shape[1:] != self.input_shape and (1, *x.shape[1:]) != self.input_shape:
            raise DataError(f"samples have shape {x.shape[1:]}; the model takes {self.input_shape}")
        x = x.reshape(len(x), *self.input_shape)
        if problem := Interface(self.inputs).problem(x):
            raise DataError(problem)
        (given,) = self.session.get_inputs()
        kind = np.int64 if given.type == "tensor(int64)" else np.float32
        names = [one.name for one in self.session.get_outputs()]
        found = [
            self._batch(x[start : start + _BATCH_SIZE], kind, names)
            for start in range(0, len(x), _BATCH_SIZE)
        ]
        return {
            name: np.concatenate(parts) for name, parts in zip(names, zip(*found, strict=True), strict=True)
        }

    def probabilities(self, x: NDArray[np.generic]) -> NDArray[np.float32]:
        """Return the probability of each class, or of each label in a multi-label task, shape (n, classes).

        Raises:
            DataError: as `answers`; or the task has no classes.
        """
        found = self.answers(x)
        if PROBABILITIES not in found:
            raise DataError(f"the model is of a {self.task.kind}, which has no probabilities")
        return found[PROBABILITIES]

    def figures(self, answers: Mapping[str, NDArray[Any]], y: NDArray[Any], where: str) -> dict[str, float]:
        """Return the task's scores by name, as far as these samples define them.

        Args:
            answers: outputs of `answers`.
            y: labels as a data source gives them; shape (n, 0) means no labels.
            where: name of the source, for messages.

        Raises:
            DataError: the labels do not belong to this task, or the model cannot predict them.
        """
        judged = answers[JUDGED[self.task.kind]]
        num_outputs = math.prod(
            answers[QUANTILES if QUANTILES in answers else JUDGED[self.task.kind]].shape[1:]
        )
        labels = self.task.checked(y, num_outputs, where)
        reference = None if self.threshold is None else np.array([self.threshold])
        return self.task.figures(judged, labels, reference)

    def _batch(self, x: NDArray[np.generic], kind: type[np.generic], names: list[str]) -> list[NDArray[Any]]:
        numbers = as_floats(x) if kind is np.float32 else x.astype(kind)
        found: list[NDArray[Any]] = self.session.run(names, {INPUT: numbers})
        return found

    def name(self, label: int) -> str:
        """Return the name of a class."""
        return self.class_names[label] if self.class_names else str(label)
