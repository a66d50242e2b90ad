"""Builds a torch module of which only a part trains: adapters are added, and the rest is frozen.

Coordinator, exporter and torch agents use this module, so that all build the same network.
"""

from collections.abc import Collection, Iterator
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fleetune.protocols.errors import ModelError
from fleetune.protocols.model.backbone_file import Tensors
from fleetune.protocols.model.spec import RUNNING_STATISTICS, Adapters, Backbone, ModelSpec

NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)  # the first base class: batch and instance norm
_CONVOLUTIONS: tuple[Any, ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_frozen_kinds: dict[type[nn.Module], type[nn.Module]] = {}


def as_described(spec: ModelSpec, module: nn.Module) -> nn.Module:
    """Change an architecture, as its author wrote it, into the module that a spec describes; return it.

    Raises:
        ModelError: the backbone names a layer that this module lacks.
    """
    if isinstance(spec.backbone, Backbone):
        if spec.backbone.adapters is not None:
            add_adapters(module, spec.backbone.adapters)
        freeze(module, {tensor.name for tensor in spec.tensors})
    return module


def add_adapters(module: nn.Module, adapters: Adapters) -> None:
    """Add a low-rank branch to these layers: <layer>.lora_a and <layer>.lora_b. B is zero.

    Raises:
        ModelError: a layer is missing, or is neither linear nor an ordinary convolution.
    """
    for path in adapters.layers:
        try:
            layer = module.get_submodule(path)
        except AttributeError:
            raise ModelError(
                f"the run adapts layer {path!r}, which this device's model lacks; install its version"
            ) from None
        if not takes_adapter(layer):
            raise ModelError(
                f"the run adapts layer {path!r}, which is neither linear nor a convolution here;"
                " install its version"
            )
        a, b = _branch(layer, adapters.rank)
        nn.init.zeros_(cast("Tensor", b.weight))
        layer.lora_a, layer.lora_b, layer.lora_scale = a, b, adapters.scale  # type: ignore[assignment]
        layer.register_forward_hook(_with_branch)


def takes_adapter(layer: nn.Module) -> bool:
    """True for linear layers and ungrouped convolutions, if torch calls them."""
    if isinstance(layer, nn.Linear):
        return not isinstance(
            layer, NonDynamicallyQuantizableLinear
        )  # MultiheadAttention reads its weight only
    return isinstance(layer, _CONVOLUTIONS) and layer.groups == 1


def _branch(layer: Any, rank: int) -> tuple[nn.Module, nn.Module]:
    # their values are drawn elsewhere, so torch's random stream must not advance
    with torch.random.fork_rng(devices=[]):
        if isinstance(layer, nn.Linear):
            a = nn.Linear(layer.in_features, rank, bias=False)
            return a, nn.Linear(rank, layer.out_features, bias=False)
        make = next(kind for kind in _CONVOLUTIONS if isinstance(layer, kind))
        same = {name: getattr(layer, name) for name in ("stride", "padding", "dilation", "padding_mode")}
        a = make(layer.in_channels, rank, layer.kernel_size, bias=False, **same)
        return a, make(rank, layer.out_channels, 1, bias=False)


def _with_branch(layer: Any, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
    branch: Tensor = layer.lora_b(layer.lora_a(arguments[0])) * layer.lora_scale
    return output + branch


def freeze(module: nn.Module, trained: Collection[str]) -> None:
    """Make only these parameters train from now on; norms without trained parameters stay in evaluation mode.

    Args:
        module: the module, which is changed in place.
        trained: names of parameters and running statistics.
    """
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in trained)
    for path, norm in module.named_modules():
        if isinstance(norm, _NormBase) and not _own(path, norm) & set(trained):
            kind = type(norm)
            if kind not in _frozen_kinds:
                _frozen_kinds[kind] = type(f"Frozen{kind.__name__}", (_Evaluates, kind), {})
            norm.__class__ = _frozen_kinds[kind]  # type: ignore[assignment]
            norm.train(False)


def _own(path: str, norm: nn.Module) -> set[str]:
    names = (*dict(norm.named_parameters(recurse=False)), *RUNNING_STATISTICS)
    return {f"{path}.{name}".lstrip(".") for name in names}


class _Evaluates:
    """Keeps a frozen norm in evaluation mode, so that its running statistics are never updated."""

    def train(self, mode: bool = True) -> Any:  # noqa: ARG002 - torch's signature
        return super().train(False)  # type: ignore[misc]


def is_statistic(module: nn.Module, buffer: str) -> bool:
    """True if a module's buffer is a running statistic of a norm that is not frozen."""
    owner, _, leaf = buffer.rpartition(".")
    return leaf in RUNNING_STATISTICS and not is_frozen(module.get_submodule(owner))


def is_counter(buffer: str) -> bool:
    """True if a buffer counts the training steps of a norm; counters restart with the weights."""
    return buffer.rpartition(".")[2] == "num_batches_tracked"


def is_frozen(module: nn.Module) -> bool:
    """True for a norm that `freeze` has frozen."""
    return isinstance(module, _Evaluates)


def frozen_tensors(module: nn.Module, buffers: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a module's backbone by name.

    Frozen parameters in module order, then statistics of frozen norms and these buffers. A tied tensor stands
    under its first name.
    """
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            yield name, parameter
    for name, buffer in module.named_buffers():
        owner, _, leaf = name.rpartition(".")
        if name in buffers or (leaf in RUNNING_STATISTICS and is_frozen(module.get_submodule(owner))):
            yield name, buffer


def frozen_values(spec: ModelSpec, module: nn.Module) -> dict[str, NDArray[np.float32]]:
    """Return copies of the tensors of a spec's backbone as float32, by name."""
    own = dict(frozen_tensors(module, {tensor.name for tensor in spec.frozen}))
    return {tensor.name: own[tensor.name].detach().float().numpy().copy() for tensor in spec.frozen}


def last_layer(spec: ModelSpec, module: nn.Module) -> str:
    """Return the name of the last layer with weights that is no norm; for adapters, their base layer."""
    # a head may have no tensor but one that is tied to the embedding, so all names count
    norms = {path for path, one in module.named_modules(remove_duplicate=False) if isinstance(one, NORMS)}
    layers = [name.rpartition(".")[0] for name, _ in module.named_parameters(remove_duplicate=False)]
    branches = ("lora_a", "lora_b") if isinstance(spec.backbone, Backbone) else ()
    return [one for one in layers if one not in norms and one.rpartition(".")[2] not in branches][-1]


def set_frozen(module: nn.Module, tensors: Tensors) -> None:
    """Set the module's frozen tensors.

    Parameters share the arrays' memory. Buffers are copies, because a module may change its buffers in place.

    Raises:
        ModelError: a tensor is missing or has another shape, or the module has no such tensor.
    """
    own = dict(frozen_tensors(module, tensors.keys()))
    for name in own.keys() | tensors.keys():
        shape = tuple(own[name].shape) if name in own else None
        if name not in tensors or tensors[name].shape != shape:
            raise ModelError(
                f"this device's model differs from the fleet's at frozen tensor {name}; install the"
                " coordinator's version"
            )
    for name, tensor in own.items():
        values = torch.from_numpy(tensors[name])
        if isinstance(tensor, nn.Parameter):
            tensor.data = values
        else:
            tensor.data = values.to(tensor.dtype, copy=True)
