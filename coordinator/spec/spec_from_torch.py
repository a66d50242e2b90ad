"""Makes the `ModelSpec` and the first weights of any torch module."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from msgspec import UNSET
from numpy.typing import NDArray
from torch import Tensor, nn

from fleetune.coordinator.spec.neuron_trace import NeuronTrace
from fleetune.coordinator.spec.neurons import Neurons
from fleetune.protocols.errors import ModelError
from fleetune.protocols.model.architectures import build, try_out
from fleetune.protocols.model.interface import PLAIN, Interface
from fleetune.protocols.model.spec import (
    RUNNING_STATISTICS,
    Adapters,
    Backbone,
    FlatArray,
    FrozenTensor,
    Kind,
    ModelSpec,
    TensorSpec,
)
from fleetune.protocols.model.torch_backbone import NORMS, frozen_tensors, is_counter, is_statistic
from fleetune.protocols.randomness import Key


def describe(
    name: str,
    module: nn.Module,
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    adapters: Adapters | None = None,
    buffers: Collection[str] = (),
    interface: Interface = PLAIN,
) -> ModelSpec:
    """Return the spec of a module: trainable parameters in module order, then running statistics.

    Parameters that do not require a gradient form the backbone, together with `buffers`. Other buffers are
    made where the module is built. A tied tensor stands under its first name. Neurons whose coupling is not
    understood are always active. The module stays unchanged.

    Args:
        name: the model's name or `module:function`.
        module: a module on the CPU, in any mode.
        input_shape: the shape of one sample, without the batch axis.
        num_classes: the number of logits.
        adapters: the adapters that were added to the module.
        buffers: the names of buffers that are sent to devices.
        interface: the interface that the module was built with.

    Raises:
        ModelError: the module cannot take this input or does not give `num_classes` logits, two tensors
            share memory, a tensor is not float32, or there is nothing to train.
    """
    tensors, frozen = _tensors(name, module), dict(frozen_tensors(module, buffers))
    for path, tensor in (tensors | frozen).items():
        if not tensor.numel():
            raise ModelError(
                f"model {name!r}: {path} has no entries, shape {tuple(tensor.shape)}; leave it out"
            )
    neurons = Neurons(tensors, frozen, [one for path, one in module.named_buffers() if path not in tensors])
    with NeuronTrace(neurons) as trace, trace.watching(module):
        logits = try_out(name, module, input_shape, num_classes)
    neurons.fix(logits)
    groups, axes = neurons.describe()
    described = tuple(
        TensorSpec(
            path,
            tuple(tensor.shape),
            _kind(module, path),
            path.rpartition(".")[0],
            axes[path],
            neurons.uses[path] // len(logits),
        )
        for path, tensor in tensors.items()
    )
    spec = ModelSpec(
        name,
        described,
        groups,
        tuple(input_shape),
        num_classes,
        interface=UNSET if interface == PLAIN else interface,
    )
    if not frozen and adapters is None:
        return spec
    backbone = tuple(_frozen(name, module, frozen, neurons.uses, len(logits)))
    return replace(spec, backbone=Backbone(backbone, adapters))


def _frozen(
    name: str, module: nn.Module, frozen: Mapping[str, Tensor], uses: Mapping[str, int], num_samples: int
) -> Iterator[FrozenTensor]:
    before, places = 0, {}
    for path, parameter in module.named_parameters():
        places[path] = before
        before += parameter.requires_grad
    for path, tensor in frozen.items():
        _check_travels(name, path, tensor)
        yield FrozenTensor(path, tuple(tensor.shape), uses[path] // num_samples, places.get(path, 0))


def _check_travels(name: str, path: str, tensor: Tensor) -> None:
    """Check that a tensor fits into float32.

    Raises:
        ModelError: the tensor does not fit.
    """
    if tensor.dtype == torch.float32:
        return
    if isinstance(tensor, nn.Parameter):
        raise ModelError(f"model {name!r}: {path} is {tensor.dtype}; every parameter must be float32")
    if tensor.is_complex() or not torch.equal(tensor.float().to(tensor.dtype), tensor):
        raise ModelError(
            f"model {name!r}: buffer {path} is random, and its {tensor.dtype} values do not fit into float32;"
            " make it float32, or draw it from a fixed seed"
        )


def drawn(
    name: str, input_shape: tuple[int, ...], num_classes: int, key: Key, interface: Interface = PLAIN
) -> nn.Module:
    """Build a model by name, with weights that `key` decides. Torch's global generator stays unchanged.

    Raises:
        ModelError: see `protocols.model.architectures.build`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(key.value)
        return build(name, input_shape, num_classes, interface)


def draw(name: str, input_shape: tuple[int, ...], num_classes: int, key: Key) -> tuple[ModelSpec, FlatArray]:
    """Return the spec of a model by name, and its first weights, shape (spec.size,), which `key` decides.

    Torch's global generator stays unchanged.

    Raises:
        ModelError: see `protocols.model.architectures.build` and `describe`.
    """
    module = drawn(name, input_shape, num_classes, key)
    spec = describe(name, module, input_shape, num_classes)
    return spec, weights_of(spec, module)


def weights_of(spec: ModelSpec, module: nn.Module) -> FlatArray:
    """Return the weights of a module that `spec` describes, shape (spec.size,)."""
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    return np.concatenate([tensors[tensor.name].detach().numpy().ravel() for tensor in spec.tensors])


def built_buffers(spec: ModelSpec, module: nn.Module) -> dict[str, NDArray[Any]]:
    """Return the buffers in a module's state_dict that `spec` does not contain, by name."""
    known = {tensor.name for tensor in spec.tensors} | {tensor.name for tensor in spec.frozen}
    state = module.state_dict()
    return {
        name: state[name].detach().numpy()
        for name, _ in module.named_buffers()
        if name in state and name not in known and not is_counter(name)
    }


def tied_names(module: nn.Module) -> dict[str, str]:
    """Return the further names of tied parameters, with the first name of each."""
    first = {id(one): name for name, one in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: first[id(one)] for name, one in every if first[id(one)] != name}


def _tensors(name: str, module: nn.Module) -> dict[str, Tensor]:
    """Return trainable parameters, then running statistics, by name."""
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    tensors: dict[str, Tensor] = {path: one for path, one in parameters.items() if one.requires_grad}
    if not tensors:
        raise ModelError(f"model {name!r} has no trainable parameters")
    tensors |= {path: one for path, one in buffers.items() if is_statistic(module, path)}
    first: dict[int, str] = {}
    for path, tensor in tensors.items():
        if tensor.dtype != torch.float32:
            raise ModelError(f"model {name!r}: {path} is {tensor.dtype}; every parameter must be float32")
        other = first.setdefault(tensor.data_ptr(), path)
        if other != path:
            raise ModelError(
                f"model {name!r}: {other} and {path} are two tensors in the same memory; give each its own,"
                " or tie them by assigning one parameter to both"
            )
    return tensors


def _kind(module: nn.Module, path: str) -> Kind:
    layer, _, leaf = path.rpartition(".")
    if leaf in RUNNING_STATISTICS:
        return "stat"
    if isinstance(module.get_submodule(layer), NORMS):
        return "norm"
    return "bias" if leaf.startswith("bias") else "weight"
