"""Freezes a part of a run's model, by the patterns in run.toml that name its layers."""

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch
from torch import nn

from fleetune.coordinator.spec.seed_dependence import drawn_buffers
from fleetune.coordinator.spec.spec_from_torch import describe, drawn
from fleetune.protocols.errors import SettingError
from fleetune.protocols.model.architectures import untried
from fleetune.protocols.model.interface import Interface, interface_of_shapes
from fleetune.protocols.model.spec import Adapters, ModelSpec
from fleetune.protocols.model.torch_backbone import add_adapters, freeze, takes_adapter
from fleetune.protocols.model.torch_interface import with_types
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.device import ModelSection

_NAMED = 12  # layers in a message


def described(settings: ModelSection, key: Key) -> tuple[ModelSpec, nn.Module]:
    """Return the spec of a run's model, and the module; `key` decides all weights except those of adapters.

    Args:
        settings: the section [model], with input_shape and num_classes.
        key: the key of the first weights.

    Raises:
        ModelError: the model cannot be built or described.
        SettingError: see `freeze_the_rest`.
    """
    name, shape, classes = settings.name, settings.input_shape, settings.num_classes
    assert shape is not None
    assert classes is not None
    interface = _interface(settings, shape, classes)
    module = drawn(name, shape, classes, key, interface)
    buffers = drawn_buffers(name, module, shape, classes, key, interface)
    adapters = freeze_the_rest(module, settings)
    spec = describe(name, module, shape, classes, adapters=adapters, buffers=buffers, interface=interface)
    if settings.backbone == "int8":
        _check_int8(spec, module)
    return spec, module


def _interface(settings: ModelSection, shape: tuple[int, ...], num_classes: int) -> Interface:
    interface = interface_of_shapes(settings.shapes_of_inputs, settings.output)
    if not interface.inputs:
        return interface
    with torch.random.fork_rng(devices=[]):
        module = untried(settings.name, shape, num_classes, interface)
    return with_types(settings.name, module, interface, settings.types_of_inputs)


def _check_int8(spec: ModelSpec, module: nn.Module) -> None:
    """Check that storing the backbone as int8 would not round a buffer of integers.

    Raises:
        SettingError: int8 would round such a buffer.
    """
    own = dict(module.named_buffers())
    for tensor in spec.frozen:
        if tensor.name in own and len(tensor.shape) > 1 and not own[tensor.name].is_floating_point():
            raise SettingError(
                f"model.backbone: int8 would round buffer {tensor.name} of {own[tensor.name].dtype};"
                " leave backbone out"
            )


def trains_in_part(settings: ModelSection) -> bool:
    """True if the settings say which part of the model trains."""
    return bool(settings.trainable) or settings.adapters is not None


def freeze_the_rest(module: nn.Module, settings: ModelSection) -> Adapters | None:
    """Freeze all of a module but the part that trains, and add adapters. The module is changed.

    Without `trainable` and `adapters` nothing changes: everything that requires a gradient trains.

    Returns:
        The adapters that were added; None if there are none.

    Raises:
        SettingError: a pattern matches no suitable layer, an adapter is for a layer that trains in full, or
            nothing is left to freeze.
    """
    if not trains_in_part(settings):
        return None
    layers = _layers(module)
    trained = _matching("model.trainable", settings.trainable, layers)
    adapters = _adapters(module, settings, layers, trained)
    first = {id(one): name for name, one in module.named_parameters()}  # of a tied parameter, its first name
    names = {
        first[id(one)]
        for path in trained
        for one in module.get_submodule(path).parameters(recurse=False)
        if one.requires_grad
    }
    names |= {
        f"{path}.{name}".lstrip(".")
        for path in trained
        for name, _ in module.get_submodule(path).named_buffers(recurse=False)
    }
    if adapters is not None:
        add_adapters(module, adapters)
        names |= {f"{path}.{leaf}.weight" for path in adapters.layers for leaf in ("lora_a", "lora_b")}
    freeze(module, names)
    return adapters


def _adapters(
    module: nn.Module, settings: ModelSection, layers: tuple[str, ...], trained: frozenset[str]
) -> Adapters | None:
    section = settings.adapters
    if section is None:
        return None
    chosen = []
    for pattern in section.of:
        found = _matching("model.adapters.of", (pattern,), layers)
        fitting = [path for path in layers if path in found and takes_adapter(module.get_submodule(path))]
        if not fitting:
            path, kind = min(found), type(module.get_submodule(min(found))).__name__
            raise SettingError(
                f"model.adapters.of: {pattern!r} matches {path} ({kind}),"
                " which is not a linear layer or a convolution without groups that its module calls; adapters"
                " are for these"
            )
        chosen += fitting
    if both := sorted(trained & set(chosen)):
        raise SettingError(
            f"model.adapters.of: layer {both[0]} trains in full (model.trainable) and needs no adapter"
        )
    wanted = tuple(path for path in layers if path in set(chosen))
    scale = 1.0 if section.alpha is None else section.alpha / section.rank
    return Adapters(wanted, section.rank, scale)


def _layers(module: nn.Module) -> tuple[str, ...]:
    """Return the paths of the modules that own parameters, in their order."""
    return tuple(
        path for path, part in module.named_modules() if any(True for _ in part.parameters(recurse=False))
    )


def _matching(key: str, patterns: Iterable[str], layers: tuple[str, ...]) -> frozenset[str]:
    """Return the layers that a pattern matches, by their own path or by the path of a module around them."""
    found: set[str] = set()
    for pattern in patterns:
        matched = {layer for layer in layers if any(fnmatchcase(path, pattern) for path in _around(layer))}
        if not matched:
            near = difflib.get_close_matches(
                pattern, [path for layer in layers for path in _around(layer)], 1
            )
            hint = f"did you mean {near[0]!r}?" if near else f"layers: {', '.join(layers[:_NAMED])}"
            more = "" if near or len(layers) <= _NAMED else f" and {len(layers) - _NAMED} more"
            raise SettingError(f"{key}: {pattern!r} matches no layer of the model; {hint}{more}")
        found |= matched
    return frozenset(found)


def _around(layer: str) -> list[str]:
    parts = layer.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
