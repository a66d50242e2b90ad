"""Runs the original module for all graphs of a batch at once: in float32, and in float64 as the reference."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from fleetune.coordinator.export.steps import BATCHES, TRAINING, Model, copied, features_watched
from fleetune.protocols.bundle.bundle import ANSWER, CONTRAST, DISTILLATION, LOSSES
from fleetune.protocols.model.torch_batch_norm import SingleValueNorms
from fleetune.protocols.model.torch_dispatch import Watching
from fleetune.protocols.model.torch_draws import GivenDraws
from fleetune.protocols.model.torch_loss_terms import contrast, distillation
from fleetune.protocols.tasks.torch_losses import mean_loss, sample_losses

Arrays = dict[str, NDArray[Any]]


class Reference:
    """The original module with given weights, in one precision.

    Args:
        model: the traced model.
        module: the original module; it stays unchanged.
        precision: torch.float32, or torch.float64 for a reference without rounding errors of float32.
    """

    def __init__(self, model: Model, module: nn.Module, precision: torch.dtype) -> None:
        self._model, self._precision = model, precision
        self._module = copied(model.spec.name, module).to(precision)
        self._buffers = {name: one.clone() for name, one in self._module.named_buffers()}

    def run(self, graphs: Collection[str], tensors: Arrays, given: Arrays) -> dict[str, Arrays]:
        """Return the outputs of these graphs as torch computes them, by graph.

        Args:
            graphs: names of graphs. Those of one mode share a forward pass.
            tensors: the model's tensors by name.
            given: all inputs of the graphs by name.
        """
        found: dict[str, dict[str, Tensor]] = {}
        with _in_double() if self._precision == torch.float64 else nullcontext():
            inputs = {name: self._tensor(value) for name, value in given.items()}
            for training in (True, False):
                names = [name for name in graphs if (name in TRAINING) == training]
                if names:
                    found |= self._outputs(names, tensors, inputs, training=training)
        return {
            graph: {name: value.detach().numpy() for name, value in outputs.items()}
            for graph, outputs in found.items()
        }

    def _tensor(self, value: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(value)
        return tensor.to(self._precision) if tensor.is_floating_point() else tensor

    def _outputs(
        self, graphs: list[str], tensors: Arrays, inputs: Mapping[str, Tensor], *, training: bool
    ) -> dict[str, dict[str, Tensor]]:
        model = self._model
        own = self._loaded(tensors, int(inputs.get(BATCHES, torch.ones(()))) - 1)
        self._module.train(training)
        watched = Model(model.spec, self._module, (), model.samples, model.num_features, False)
        with (
            SingleValueNorms() if len(inputs["x"]) == 1 else nullcontext(),
            GivenDraws(lambda index, _: inputs[f"noise:{index}"]),
            features_watched(watched) as calls,
            torch.set_grad_enabled(graphs != [ANSWER]),
        ):
            logits = self._module(inputs["x"].clone())  # a module may write into its input
        features = None if model.num_features is None else calls[0][0].flatten(1)
        found: dict[str, dict[str, Tensor]] = {}
        for graph in graphs:
            if graph == ANSWER:
                found[graph] = {"logits": logits} | ({} if features is None else {"features": features})
            elif graph == LOSSES:
                losses = sample_losses(model.task.loss, model.task.section, logits, inputs["y"])
                found[graph] = {"losses": losses}
            else:
                found[graph] = self._gradients(graph, own, inputs, logits, features)
        return found

    def _loaded(self, tensors: Arrays, batches_before: int) -> dict[str, Tensor]:
        """Return the module's tensors by name, with these values; buffers are the original module's."""
        own = dict(self._module.named_parameters()) | dict(self._module.named_buffers())
        with torch.no_grad():
            for name, buffer in self._module.named_buffers():
                buffer.copy_(self._buffers[name])
                if name.endswith("num_batches_tracked"):
                    buffer.fill_(batches_before)
            for name, value in tensors.items():
                own[name].copy_(torch.from_numpy(value))
        return own

    def _gradients(
        self,
        graph: str,
        own: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        logits: Tensor,
        features: Tensor | None,
    ) -> dict[str, Tensor]:
        loss, total = _losses(self._model, graph, inputs, logits, features)
        names = [tensor.name for tensor in self._model.spec.tensors if tensor.kind != "stat"]
        with _disable_current_modes():  # backward passes keep the types of their forward passes
            gradients = torch.autograd.grad(
                total, [own[name] for name in names], retain_graph=True, allow_unused=True
            )
        found = {"loss": loss}
        for name, gradient in zip(names, gradients, strict=True):
            found[f"gradient:{name}"] = torch.zeros_like(own[name]) if gradient is None else gradient
        for tensor in self._model.spec.tensors:
            if tensor.kind == "stat":
                found[f"statistic:{tensor.name}"] = own[tensor.name].clone()
        return found


def _losses(
    model: Model, graph: str, inputs: Mapping[str, Tensor], logits: Tensor, features: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the mean loss, and the sum of all terms, whose gradient the graph computes.

    The function of this name in `export.steps` is not used, so that the check finds its faults.
    """
    loss = total = mean_loss(model.task.loss, model.task.section, logits, inputs["y"])
    if graph == DISTILLATION:
        total = total + distillation(
            logits, *(inputs[name] for name in ("teacher", "strength", "temperature"))
        )
    if graph == CONTRAST:
        assert features is not None
        names = ("near", "far", "strength", "temperature")
        total = total + contrast(features, *(inputs[name] for name in names))
    return loss, total


@contextmanager
def _in_double() -> Iterator[None]:
    """Computes in float64 also where a module asks for float32 or for the default type.

    Its limits stay those of float32 (`torch.finfo`), because modules take constants from them.
    """
    default, finfo = torch.get_default_dtype(), torch.finfo
    torch.set_default_dtype(torch.float64)
    torch.finfo = lambda *_: finfo(torch.float32)  # type: ignore[assignment,misc]
    try:
        with _Float32Limits(), _DoubleInsteadOfFloat():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.finfo = finfo  # type: ignore[misc]
        torch.set_default_dtype(default)


class _DoubleInsteadOfFloat(Watching):  # type: ignore[no-untyped-call]
    """Replaces float32 by float64 wherever an operator is asked for a type."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("dtype") == torch.float32:
            kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)


class _Float32Limits(TorchFunctionMode):
    """Gives RMS norms without a constant of their own that of float32, which torch takes from the type."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.rms_norm and len(args) < 4 and kwargs.get("eps") is None:
            kwargs = kwargs | {"eps": float(np.finfo(np.float32).eps)}
        return func(*args, **kwargs)
