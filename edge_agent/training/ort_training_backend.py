"""A `Backend` on onnxruntime-training, which has its own training kernels."""

import tempfile
from collections import OrderedDict
from collections.abc import Collection, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.training.backend import ExtraLoss, InputArray, LabelArray, UpperLayers
from fleetune.edge_agent.training.onnx_backend import OnnxBackend
from fleetune.edge_agent.training.ort_training_package import training_api
from fleetune.edge_agent.training.step_guard import StepGuard
from fleetune.protocols.bundle import ort_training
from fleetune.protocols.bundle.bundle import TRAIN, Bundle
from fleetune.protocols.errors import ModelError, PacketForeign, StoreError
from fleetune.protocols.model.backbone_file import Tensors
from fleetune.protocols.model.spec import TensorSpec
from fleetune.protocols.randomness import Key

MAX_MODULES = 3  # A method uses a few sets of layers, and each has its own parameters and gradients.

_SILENT = 4  # log nothing below errors: failures are raised
_FOREIGN = "bundle of model {}: its part for onnxruntime-training belongs to another model"

Array = NDArray[Any]


class OrtTrainingBackend(OnnxBackend):
    """A `Backend` on onnxruntime-training.

    Steps with a loss term, gradients in evaluation mode and answers run the bundle's graphs, as with
    onnxruntime.

    Args:
        bundle: the model's bundle.
        threads: processor threads of a step.
        frozen: see `OnnxBackend`.
        guard, room: see `Sessions`. They cannot end the package's own steps early.

    Raises:
        ModelError: onnxruntime-training is missing, or the bundle has no part for it.
    """

    def __init__(
        self,
        bundle: Bundle,
        threads: int = 1,
        *,
        frozen: Tensors = MappingProxyType({}),
        guard: StepGuard | None = None,
        room: int | None = None,
    ) -> None:
        self._api = training_api()
        super().__init__(bundle, threads, frozen=dict(frozen), guard=guard, room=room)
        if ort_training.TRAINING_MODEL not in bundle.ort_training:
            raise ModelError(
                f"the bundle of model {bundle.spec.name} has no part for onnxruntime-training; use"
                " --trainer onnx"
            )
        self._threads = threads
        self._modules: OrderedDict[frozenset[str], _TrainingModule] = OrderedDict()

    def upper_layers(self) -> UpperLayers | None:
        """Return None: the package's training model cannot be divided."""
        return None

    def smaller_network(self, counts: tuple[int, ...]) -> None:  # noqa: ARG002 - of none
        """Return None: the package's training model has fixed sizes."""
        return

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
        wanted = frozenset(self._gradients if tensors is None else tensors)
        if not training or extra_loss is not None:
            return super().step(x, y, key, training=training, extra_loss=extra_loss, tensors=tensors)
        self._check(x, y)
        if (
            TRAIN in self._bundle.graphs
        ):  # A bundle from the wire always has this figure, which tells what a step takes.
            self._sessions.price(TRAIN, self._outputs(self._gradients, training=True), len(y))
        feeds = {"x": self._input(x), "y": np.ascontiguousarray(y), **self._tensors}
        last = next(reversed(self._gradients))  # A Module must compute a gradient; this one costs least.
        module = self._module(wanted or frozenset({last}))
        found = module.run(feeds | self._training_feeds(key, len(y), module.inputs))
        self._take(found, wanted, training=True)
        return float(found["loss"])

    def _module(self, wanted: frozenset[str]) -> "_TrainingModule":
        if wanted not in self._modules:
            self._modules[wanted] = _TrainingModule(self._api, self._bundle, wanted, self._threads)
            while len(self._modules) > MAX_MODULES:
                self._modules.popitem(last=False)
        self._modules.move_to_end(wanted)
        return self._modules[wanted]


class _TrainingModule:
    """The package's Module for a bundle, with the gradients of some of its tensors.

    Args:
        api: `onnxruntime.training.api`.
        bundle: the model's bundle.
        wanted: names of at least one parameter. Gradients of all others are not computed.
        threads: processor threads of a step.

    Raises:
        ModelError: the package cannot load the model.
        StoreError: temporary files, which the package needs, do not fit on the disk.
        PacketCorrupt, PacketForeign: the bundle's training model is damaged or of another model.
    """

    def __init__(self, api: Any, bundle: Bundle, wanted: frozenset[str], threads: int) -> None:
        spec = bundle.spec
        parameters = [tensor for tensor in spec.tensors if tensor.kind != "stat"]
        statistics = [tensor for tensor in spec.tensors if tensor.kind == "stat"]
        trained = [tensor for tensor in parameters if tensor.name in wanted]
        self._name = spec.name
        self._outputs = ["loss", *(f"statistic:{one.name}" for one in statistics)]
        flags = [ort_training.gradient_flag(one.name) for one in trained]
        model = ort_training.cut(bundle.ort_training[ort_training.TRAINING_MODEL], [*self._outputs, *flags])
        try:
            self._module, state = _load(api, model, parameters, wanted, threads)
        except OSError as problem:
            line = f"{tempfile.gettempdir()}: {problem.strerror}; free space there, or set TMPDIR"
            raise StoreError(line) from problem
        except Exception as problem:  # the runtime's errors have no common type
            line = f"onnxruntime-training cannot load model {spec.name}: {_line(problem)}"
            raise ModelError(line) from problem
        self.inputs: list[str] = self._module.input_names()
        self._parameters = {one.name: state.parameters[one.name].data for one in parameters}
        self._gradients = {f"gradient:{one.name}": state.parameters[one.name].grad for one in trained}
        if any(self._parameters[one.name].shape != one.shape for one in parameters):
            raise PacketForeign(_FOREIGN.format(spec.name))

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run one step.

        Args:
            feeds: samples, labels, noises and all tensors by the names of `protocols.bundle.bundle`.

        Returns:
            Loss, gradients and new statistics by such names. Gradients are valid until the next run.

        Raises:
            ModelError: the package cannot compute it.
            PacketForeign: the training model has other inputs.
        """
        for name, view in self._parameters.items():
            view[...] = feeds[name]
        if not feeds.keys() >= set(self.inputs):
            raise PacketForeign(_FOREIGN.format(self._name))
        self._module.lazy_reset_grad()
        try:
            found = self._module(*(feeds[name] for name in self.inputs))
        except Exception as problem:  # the runtime's errors have no common type
            raise ModelError(f"model {self._name} cannot compute: {_line(problem)}") from problem
        values = found if isinstance(found, tuple) else (found,)
        return {**dict(zip(self._outputs, values, strict=True)), **self._gradients}


def _load(
    api: Any, model: bytes, parameters: list[TensorSpec], wanted: frozenset[str], threads: int
) -> tuple[Any, Any]:
    """Return the package's Module and CheckpointState, with memory for all parameters.

    They are loaded through temporary files, because the package reads only files.
    """
    runtime, native = import_module("onnxruntime"), import_module("onnxruntime.capi._pybind_state")
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = _SILENT
    trained = [ort_training.declaration(one) for one in parameters if one.name in wanted]
    frozen = [ort_training.declaration(one) for one in parameters if one.name not in wanted]
    with tempfile.TemporaryDirectory(prefix="fleetune-") as folder:
        training_model, checkpoint = Path(folder, ort_training.TRAINING_MODEL), Path(folder, "checkpoint")
        training_model.write_bytes(model)
        native.save_checkpoint(trained, frozen, str(checkpoint), True)  # types and shapes without values
        state = api.CheckpointState.load_checkpoint(checkpoint)
        module = api.Module(training_model, state, session_options=options)
    blank = np.zeros(module.get_parameters_size(trainable_only=False), np.float32)
    values = runtime.OrtValue.ortvalue_from_numpy(blank)._ortvalue  # noqa: SLF001 - Module takes no other
    module.copy_buffer_to_parameters(values, trainable_only=False)
    return module, state


def _line(problem: Exception) -> str:
    """Return the runtime's message without the position in its source code."""
    return " ".join(str(problem).split()).rpartition("[ONNXRuntimeError]")[2][-300:].strip(" :")
