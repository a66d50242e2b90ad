"""The answers of a personal model, by the run's task: ONNX nodes from the model's outputs to answers."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fleetune.protocols.bundle.graph import Constant, Node, Port
from fleetune.protocols.model.spec import Dimension
from fleetune.protocols.tasks.losses import QUANTILE
from fleetune.protocols.tasks.reconstruction import Reconstruction
from fleetune.protocols.tasks.task import Task

LOGITS, PROBABILITIES, LABEL, PRESENT = "logits", "probabilities", "label", "present"
NUMBERS, QUANTILES = "numbers", "quantiles"
RECONSTRUCTION, ERROR, ANOMALY = "reconstruction", "error", "anomaly"
JUDGED = {  # the output that `Task.figures` takes to score a model
    "classification": LOGITS,
    "multi-label": LOGITS,
    "regression": NUMBERS,
    "forecast": NUMBERS,
    "reconstruction": ERROR,
}


@dataclass(frozen=True)
class Answers:
    """The last part of an inference graph, after the nodes that compute `logits`, the model's own outputs."""

    outputs: tuple[Port, ...]
    nodes: tuple[Node, ...]
    constants: tuple[Constant, ...] = ()


def answers_of(task: Task, num_outputs: int, threshold: float | None) -> Answers:
    """Return the nodes and outputs that answer for a task.

    Args:
        task: task of the run.
        num_outputs: number of the model's outputs.
        threshold: a larger error marks an anomaly; None if not known, so that no sample is marked.
    """
    if isinstance(task, Reconstruction):
        return _reconstruction(task, num_outputs, threshold)
    make: dict[str, Callable[[Task, int], Answers]] = {
        "classification": _classification,
        "multi-label": _multi_label,
    }
    return make.get(task.kind, _numbers)(task, num_outputs)


def _classification(_: Task, num_outputs: int) -> Answers:
    return Answers(
        (
            Port(LOGITS, "f4", ("n", num_outputs)),
            Port(PROBABILITIES, "f4", ("n", num_outputs)),
            Port(LABEL, "i8", ("n",)),
        ),
        (
            Node("Softmax", (LOGITS,), (PROBABILITIES,), {"axis": 1}),
            Node("ArgMax", (LOGITS,), (LABEL,), {"axis": 1, "keepdims": 0}),
        ),
    )


def _multi_label(_: Task, num_outputs: int) -> Answers:
    each: tuple[Dimension, ...] = ("n", num_outputs)
    return Answers(
        (Port(LOGITS, "f4", each), Port(PROBABILITIES, "f4", each), Port(PRESENT, "i8", each)),
        (
            Node("Sigmoid", (LOGITS,), (PROBABILITIES,), {}),
            Node("Greater", (LOGITS, "answer:zero"), ("answer:above",), {}),
            Node("Cast", ("answer:above",), (PRESENT,), {"to": 7}),
        ),
        (Constant("answer:zero", np.array(0, np.float32)),),
    )


def _numbers(task: Task, num_outputs: int) -> Answers:
    if task.loss != QUANTILE:
        return Answers(
            (Port(NUMBERS, "f4", ("n", num_outputs)),), (Node("Identity", (LOGITS,), (NUMBERS,), {}),)
        )
    quantiles = task.section.quantiles
    count, middle = num_outputs // len(quantiles), int(np.argmin(np.abs(np.subtract(quantiles, 0.5))))
    return Answers(
        (
            Port(NUMBERS, "f4", ("n", count)),
            Port(QUANTILES, "f4", ("n", count, len(quantiles))),
        ),
        (
            Node("Reshape", (LOGITS, "answer:shape"), (QUANTILES,), {}),
            Node("Gather", (QUANTILES, "answer:middle"), (NUMBERS,), {"axis": 2}),
        ),
        (
            Constant("answer:shape", np.array([-1, count, len(quantiles)], np.int64)),
            Constant("answer:middle", np.array(middle, np.int64)),
        ),
    )


def _reconstruction(task: Task, num_outputs: int, threshold: float | None) -> Answers:
    """Return answers that reconstruct the sample in the model's form: flat, scaled by the run's [data]."""
    values, constants = _error_nodes(task)
    outputs = [Port(RECONSTRUCTION, "f4", ("n", num_outputs)), Port(ERROR, "f4", ("n",))]
    nodes = [
        Node("Identity", (LOGITS,), (RECONSTRUCTION,), {}),
        Node("Flatten", ("x",), ("answer:truth",), {"axis": 1}),
        Node("Sub", (LOGITS, "answer:truth"), ("answer:residual",), {}),
        *values,
        Node("ReduceMean", ("answer:errors",), (ERROR,), {"axes": (1,), "keepdims": 0}),
    ]
    if threshold is not None:
        outputs.append(Port(ANOMALY, "i8", ("n",)))
        constants.append(Constant("answer:threshold", np.array(threshold, np.float32)))
        nodes += [
            Node("Greater", (ERROR, "answer:threshold"), ("answer:above",), {}),
            Node("Cast", ("answer:above",), (ANOMALY,), {"to": 7}),
        ]
    return Answers(tuple(outputs), tuple(nodes), tuple(constants))


def _error_nodes(task: Task) -> tuple[list[Node], list[Constant]]:
    """Return nodes from residuals to errors, as `protocols.tasks.losses` defines them."""
    if task.loss == "absolute":
        return [Node("Abs", ("answer:residual",), ("answer:errors",), {})], []
    if task.loss == "squared":
        return [Node("Mul", ("answer:residual", "answer:residual"), ("answer:errors",), {})], []
    delta = task.section.huber_delta
    constants = {"answer:least": -delta, "answer:most": delta, "answer:half": 0.5}
    return [
        Node("Clip", ("answer:residual", "answer:least", "answer:most"), ("answer:slopes",), {}),
        Node("Mul", ("answer:slopes", "answer:half"), ("answer:halves",), {}),
        Node("Sub", ("answer:residual", "answer:halves"), ("answer:rest",), {}),
        Node("Mul", ("answer:slopes", "answer:rest"), ("answer:errors",), {}),
    ], [Constant(name, np.array(value, np.float32)) for name, value in constants.items()]
