"""A `Backend` that runs a bundle's graphs with ONNX Runtime and numpy."""

import copy
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.training.backend import (
    ExtraLoss,
    InputArray,
    LabelArray,
    SmallerNetwork,
    UpperLayers,
    check_labels,
)
from fleetune.edge_agent.training.onnx_sessions import Sessions
from fleetune.edge_agent.training.optimisers.optimiser import OptimiserState
from fleetune.edge_agent.training.smaller_network import SmallerNetworks
from fleetune.edge_agent.training.step_guard import StepGuard
from fleetune.protocols.bundle import bundle as graphs
from fleetune.protocols.bundle.bundle import Bundle
from fleetune.protocols.bundle.graph_cut import Cut, cut
from fleetune.protocols.bundle.onnx_file import INT8, SCALE
from fleetune.protocols.bundle.smaller_graph import smaller_bundle
from fleetune.protocols.errors import ModelError
from fleetune.protocols.method.trainer import FitPlan
from fleetune.protocols.model.backbone_file import Int8Tensors, Tensors
from fleetune.protocols.model.loss_terms import Answer, Distillation
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.settings.section import PROCESSOR
from fleetune.protocols.tasks.task import Task

_INPUT_TYPES = {"f4": np.float32, "i8": np.int64}

LARGE_BYTES = 2**20  # below this size, a copy of all weights takes less time than binding other arrays
LOWER = "lower"  # graph of a divided bundle that computes features from samples

Array = NDArray[Any]


class OnnxBackend:
    """A `Backend` on ONNX Runtime. The tensors that the runtime reads are views of the flat vector.

    Large models are not copied to be evaluated or handed over, and have a gradient only while they train.

    Args:
        bundle: the model's bundle.
        threads: processor threads of a step.
        frozen: tensors of the model's backbone, which the runtime reads without copying.
        guard, room, cache_bytes, device: see `Sessions`.

    Raises:
        ModelError: ONNX Runtime is missing or too old, or cannot compute on the device.
    """

    def __init__(
        self,
        bundle: Bundle,
        threads: int = 1,
        *,
        frozen: Tensors = MappingProxyType({}),
        guard: StepGuard | None = None,
        room: int | None = None,
        cache_bytes: int = 0,
        device: str = PROCESSOR,
    ) -> None:
        self._bundle, self._spec, self._task = bundle, bundle.spec, bundle.learns
        int8 = frozen.weights if isinstance(frozen, Int8Tensors) else {}
        self._new_sessions = partial(
            Sessions,
            threads=threads,
            guard=guard,
            room=room,
            cache_bytes=cache_bytes,
            dequantised=frozenset(int8),
            device=device,
        )
        self._sessions = self._new_sessions(bundle)
        self._of_bundle = partial(
            OnnxBackend, threads=threads, guard=guard, room=room, cache_bytes=cache_bytes, device=device
        )
        self._smaller = SmallerNetworks(self, self._make_smaller)
        self._cut: Cut | None = None
        self._loss = np.zeros((), np.float32)
        self._tensors: dict[str, Array] = {}
        self._bind(np.zeros(self._spec.size, np.float32))
        self._is_others = False  # True if the weights are an array of the caller's, which must not change
        self._gradient: FlatArray | None = None
        self._gradient_views: dict[str, Array] = {}
        self._tensors |= {name: frozen[name] for name in frozen.keys() - int8.keys()}
        for name, weight in int8.items():
            self._tensors |= {f"{name}{INT8}": weight.numbers, f"{name}{SCALE}": weight.scale}
        self._batches = 0
        self._statistics = [tensor.name for tensor in self._spec.tensors if tensor.kind == "stat"]

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def task(self) -> Task:
        return self._task

    @property
    def vocabulary(self) -> int | None:
        """Number of token ids, see `Backend.vocabulary`."""
        return self._bundle.vocabulary

    @property
    def weights(self) -> FlatArray:
        return self._weights

    @property
    def gradient(self) -> FlatArray:
        if self._gradient is None:
            self._gradient = np.zeros(self._spec.size, np.float32)
            views = self._spec.views(self._gradient)
            self._gradient_views = {tensor.name: view for tensor, view in views if tensor.kind != "stat"}
        return self._gradient

    @property
    def _gradients(self) -> dict[str, Array]:
        """The gradient of each parameter, by its name: views of `gradient`."""
        _ = self.gradient
        return self._gradient_views

    def gpu_descent(
        self,
        settings: TrainingSection,
        plan: FitPlan,
        before: OptimiserState | None,
    ) -> None:
        """Return None: this backend computes with `weights` and `gradient` themselves."""

    def load(self, weights: FlatArray) -> None:
        """Copy `weights`, shape (spec.size,), into `self.weights`."""
        self._check_size(weights)
        if self._is_others:
            self._bind(np.empty(self._spec.size, np.float32))
            self._is_others = False
        self._weights[:] = weights
        self._batches = 0

    def look_at(self, weights: FlatArray) -> None:
        """Compute with `weights` themselves if they are large, see `Backend.look_at`."""
        if weights.nbytes < LARGE_BYTES or weights.dtype != np.float32 or not weights.flags.c_contiguous:
            self.load(weights)
            return
        self._check_size(weights)
        self._bind(weights)
        self._is_others, self._batches = True, 0

    def take(self) -> FlatArray:
        """Return the weights, or a copy if they are small, see `Backend.take`."""
        if self._weights.nbytes < LARGE_BYTES:
            return self._weights.copy()
        self._is_others, self._gradient, self._gradient_views = True, None, {}
        self._sessions.forget_arrays()
        return self._weights

    def _bind(self, weights: FlatArray) -> None:
        """Let the runtime read its tensors from this vector."""
        self._sessions.forget_arrays()
        self._weights = weights
        views = self._spec.views(weights)
        # a new dict, because the upper layers of a divided model share the old one
        self._tensors = self._tensors | {tensor.name: view for tensor, view in views}

    def _check_size(self, weights: FlatArray) -> None:
        if weights.shape != (self._spec.size,):
            raise ModelError(
                f"model {self._spec.name} has {self._spec.size} weights, but got an array of shape"
                f" {weights.shape}"
            )

    def step(
        self,
        x: InputArray,
        y: LabelArray,
        key: Key,
        *,
        training: bool = True,
        extra_loss: ExtraLoss | None = None,
        tensors: Collection[str] | None = None,
    ) -> float:
        """Compute the gradient of a batch and return its mean loss, see `Backend.step`."""
        self._check(x, y)
        wanted = self._gradients.keys() if tensors is None else tensors
        graph, outputs = _graph(training, extra_loss), self._outputs(wanted, training=training)
        taken = self._sessions.price(graph, outputs, len(y))
        feeds = {**self._samples(x), "y": y, **self._tensors, **_extra_loss_feeds(extra_loss)}
        if training:
            feeds |= self._training_feeds(key, len(y), taken)
        into = {"loss": self._loss, **{f"gradient:{name}": self._gradients[name] for name in wanted}}
        found = self._sessions.run(graph, outputs, feeds, into)
        self._take(found, wanted, training=training)
        return float(self._loss)

    def upper_layers(self) -> UpperLayers | None:
        """Return the bundle's graphs from the boundary on, see `Backend.upper_layers`."""
        whole = self._cut is None and not self._task.targets_are_samples
        found = cut(self._bundle) if whole else None
        if found is None:
            return None
        upper, lower = copy.copy(self), {LOWER: found.lower}
        upper._take_part(found)  # noqa: SLF001 - of this class
        sessions = self._new_sessions(replace(self._bundle, graphs=lower))
        names = frozenset(found.lower.output_names)

        def features(x: InputArray) -> FlatArray:
            made = sessions.run(LOWER, names, {"x": self._input(x), **self._tensors})
            rows = [made[name].reshape(len(x), -1) for name in found.lower.output_names]
            return rows[0] if len(rows) == 1 else np.concatenate(rows, axis=1)

        return UpperLayers(upper, found.size, features)

    def smaller_network(self, counts: tuple[int, ...]) -> SmallerNetwork | None:
        """Return the bundle's training graph with smaller tensors, see `Backend.smaller_network`."""
        return self._smaller.of(counts)

    def _make_smaller(self, counts: tuple[int, ...]) -> "OnnxBackend | None":
        bundle = smaller_bundle(self._bundle, counts)
        return None if bundle is None else self._of_bundle(bundle)

    def _take_part(self, found: Cut) -> None:
        self._cut, self._bundle = found, replace(self._bundle, graphs=found.upper)
        self._sessions = self._new_sessions(self._bundle)

    def _samples(self, x: InputArray) -> dict[str, Array]:
        """Return the inputs of the graphs: samples, or the features at the boundary of a divided bundle."""
        if self._cut is None:
            return {"x": self._input(x)}
        given, start = {"x": np.asarray(x)}, 0  # an array that shows the number of samples
        for port, size in self._cut.ports:
            rows = np.ascontiguousarray(x[:, start : start + size], np.float32)
            given[port.name] = rows.reshape(len(x), *(int(one) for one in port.shape[1:]))
            start += size
        return given

    def evaluate(self, x: InputArray, y: LabelArray) -> tuple[float, NDArray[np.float32]]:
        """Return the sum of losses and the outputs, see `Backend.evaluate`."""
        self._check(x, y)
        outputs = self.answer(x, "logits")
        return float(self._sample_losses(x, y, outputs).sum()), outputs

    def losses(self, x: InputArray, y: LabelArray) -> NDArray[np.float64]:
        """Return the loss of each sample, see `Backend.losses`."""
        self._check(x, y)
        return self._sample_losses(x, y, None)

    def _sample_losses(
        self, x: InputArray, y: LabelArray, outputs: NDArray[np.float32] | None
    ) -> NDArray[np.float64]:
        """Return the loss of each sample, computed by numpy or by the user's own graph."""
        if not self._task.users_loss:
            given = self.answer(x, "logits") if outputs is None else outputs
            return self._task.sample_losses(given, y)
        feeds = {**self._samples(x), "y": y, **self._tensors}
        found = self._sessions.run(graphs.LOSSES, frozenset({"losses"}), feeds)["losses"]
        return found.astype(np.float64)

    def answer(self, x: InputArray, what: Answer) -> NDArray[np.float32]:
        """Return the logits, or the input of the last layer, see `Backend.answer`."""
        if what not in self._bundle.graphs[graphs.ANSWER].output_names:
            raise ModelError(
                f"model {self._spec.name}: this method needs a last layer that is called once with one"
                " tensor;"
                " choose another method or model"
            )
        feeds = {**self._samples(x), **self._tensors}
        array: NDArray[np.float32] = self._sessions.run(graphs.ANSWER, frozenset({what}), feeds)[what]
        return array

    def _outputs(self, wanted: Collection[str], *, training: bool) -> frozenset[str]:
        """Return the names of the outputs of a step: loss, gradients of these tensors, and new statistics."""
        statistics = self._statistics if training else ()
        gradients = (f"gradient:{name}" for name in wanted)
        return frozenset({"loss", *gradients, *(f"statistic:{name}" for name in statistics)})

    def _take(self, found: Mapping[str, Array], wanted: Collection[str], *, training: bool) -> None:
        """Copy a step's results into the flat vectors, except gradients that the runtime wrote there."""
        for name, gradient in self._gradients.items():
            if name not in wanted:
                gradient[...] = 0
            elif f"gradient:{name}" in found:
                gradient[...] = found[f"gradient:{name}"]
        if training:
            for name in self._statistics:
                self._tensors[name][...] = found[f"statistic:{name}"]

    def _input(self, x: InputArray) -> Array:
        return np.ascontiguousarray(x, _INPUT_TYPES[self._bundle.input_type])

    def _training_feeds(self, key: Key, num_samples: int, taken: Collection[str]) -> dict[str, Array]:
        """Return the step's random numbers, and the number of steps since the weights were loaded.

        The number includes this step. Norms without momentum average over it.
        """
        self._batches += 1
        drawn = {
            f"noise:{index}": noise.draw(key, index, num_samples)
            for index, noise in enumerate(self._bundle.noises)
            if f"noise:{index}" in taken
        }
        return {**drawn, "batches": np.array(self._batches, np.float32)}

    def _check(self, x: InputArray, y: LabelArray) -> None:
        """Raise ModelError for a batch that torch would reject; the runtime would compute a result from any
        label.
        """
        spec = self._spec
        shape = spec.input_shape if self._cut is None else (self._cut.size,)
        if x.shape != (len(y), *shape) or not len(y):
            raise ModelError(
                f"model {spec.name} takes samples of shape {shape}; got a batch of {x.shape}"
                f" with {len(y)} labels"
            )
        wanted = self._task.target_shape(spec.num_classes, spec.input_shape)
        kind = np.integer if wanted == () else np.floating
        if not np.issubdtype(x.dtype, np.number) or not np.issubdtype(y.dtype, kind):
            labels = "whole labels" if wanted == () else "numbers as labels"
            raise ModelError(f"model {spec.name} takes numbers and {labels}; got {x.dtype} and {y.dtype}")
        if y.shape[1:] != wanted:
            raise ModelError(f"model {spec.name} takes labels of shape {wanted}; got {y.shape[1:]}")
        if wanted == ():
            check_labels(spec, y)


def _graph(training: bool, extra_loss: ExtraLoss | None) -> str:
    if not training:
        return graphs.EVALUATE_GRADIENT
    if extra_loss is None:
        return graphs.TRAIN
    return graphs.DISTILLATION if isinstance(extra_loss.loss_term, Distillation) else graphs.CONTRAST


def _extra_loss_feeds(extra_loss: ExtraLoss | None) -> dict[str, Array]:
    if extra_loss is None:
        return {}
    names = ("teacher",) if isinstance(extra_loss.loss_term, Distillation) else ("near", "far")
    return {
        **dict(zip(names, extra_loss.answers, strict=True)),
        "strength": np.array(extra_loss.loss_term.strength, np.float32),
        "temperature": np.array(extra_loss.loss_term.temperature, np.float32),
    }
