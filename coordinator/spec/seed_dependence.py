"""Finds what depends on the seed in a user's model, by building the model twice.

Parameters and running statistics are sent anyway. Buffers that differ join the backbone. Anything else that
differs, such as a plain tensor attribute or a list of random indices, cannot be sent.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fleetune.coordinator.spec.spec_from_torch import drawn
from fleetune.protocols.errors import ModelError
from fleetune.protocols.model.architectures import names
from fleetune.protocols.model.interface import PLAIN, Interface
from fleetune.protocols.model.token_ids import blank_batch, samples_of
from fleetune.protocols.model.torch_backbone import is_counter, is_statistic
from fleetune.protocols.model.torch_failures import failing_part
from fleetune.protocols.randomness import Key
from fleetune.protocols.user_code import as_line, running_model

_TOLERANCE = 1e-3  # of the outputs; rounding makes 1e-6 of it, other random numbers 0.1 and more


def drawn_buffers(
    name: str,
    module: nn.Module,
    input_shape: tuple[int, ...],
    num_classes: int,
    key: Key,
    interface: Interface = PLAIN,
) -> frozenset[str]:
    """Return the names of buffers that differ with another seed, without running statistics.

    Args:
        name: the name of the model.
        module: the module that `drawn` built with `key`; it stays unchanged.
        input_shape: the shape of one sample, without the batch axis.
        num_classes: the number of logits.
        key: the key of the first weights.
        interface: the interface that the module was built with.

    Raises:
        ModelError: the model cannot be built again, or the seed changes something that cannot be sent.
    """
    if name in names():  # ours have none
        return frozenset()
    _check_norms(name, module)
    _check_batch_size(name, module, input_shape, num_classes)
    other = drawn(name, input_shape, num_classes, key.child("other"), interface)
    mine, others = (dict(one.named_buffers()) for one in (module, other))
    found = set()
    for path, buffer in mine.items():
        if is_statistic(module, path) or is_counter(path):
            continue
        if path not in others or others[path].shape != buffer.shape:
            raise ModelError(
                f"model {name!r}: buffer {path} has another shape with another seed; give it one shape"
            )
        if not _same(buffer, others[path]):
            found.add(path)
    _check_the_rest(name, module, other, _samples(module, input_shape, interface))
    return frozenset(found)


def _check_norms(name: str, module: nn.Module) -> None:
    """Refuse torch's first `spectral_norm`, which starts with random vectors and corrects them only in
    training.

    A device would evaluate with the random vectors, which give the logits any sign and size.
    """
    for path, part in module.named_modules():
        hooks = part._forward_pre_hooks.values()  # noqa: SLF001 - torch has no public way to list them
        if any(type(hook).__name__ == "SpectralNorm" for hook in hooks):
            where = path or "the model itself"
            raise ModelError(
                f"model {name!r}: {where} has torch.nn.utils.spectral_norm, whose vectors"
                " are right only after training; use torch.nn.utils.parametrizations.spectral_norm"
            )


def _check_batch_size(name: str, module: nn.Module, input_shape: tuple[int, ...], num_classes: int) -> None:
    """Check that the model takes three samples as it takes two. A batch of one sample is checked on
    devices.
    """
    blank = blank_batch(module, input_shape)
    x = torch.cat([blank, blank[:1]])
    try:
        found = tuple(_outputs(module, x).shape)
    except Exception as problem:  # a user's module may raise anything
        where, why = failing_part(module.eval(), x) or ("the model itself", as_line(problem))
        raise ModelError(
            f"model {name!r} depends on the batch size: {where} takes 2 samples and fails on 3 ({why});"
            " batches have any size, so take it from the input (x.shape[0])"
        ) from problem
    if found != (3, num_classes):
        raise ModelError(
            f"model {name!r} depends on the batch size: it gives {found} for 3 samples; make it"
            f" (3, {num_classes}), and take the batch size from the input (x.shape[0])"
        )


def _check_the_rest(name: str, module: nn.Module, other: nn.Module, x: Tensor) -> None:
    """Check that both builds compute the same once they have the same parameters and buffers."""
    try:
        other.load_state_dict(module.state_dict())
    except RuntimeError as problem:
        line = " ".join(str(problem).split())
        raise ModelError(f"model {name!r}: another seed builds another model: {line}") from None
    buffers = dict(module.named_buffers())
    for path, buffer in other.named_buffers():
        buffer.data = buffers[path].detach().clone()  # also those that are not persistent
    with running_model(name, "cannot take random samples"):
        once, again, rebuilt = (_outputs(one, x) for one in (module, module, other))
    # the first condition: the model is random in every call
    if not _alike(once, again) or _alike(once, rebuilt):
        return
    where = next(_random_attributes(module, other), "a value that is neither")
    raise ModelError(
        f"model {name!r}: {where} is random and is no parameter or buffer, so devices would get other values;"
        " make it a buffer (self.register_buffer), or draw it from a fixed seed"
    )


def _samples(module: nn.Module, input_shape: tuple[int, ...], interface: Interface) -> Tensor:
    """Random samples; of token ids, only ids that every vocabulary has."""
    if interface.inputs:
        normal = Key(0).generator().normal(size=(2, *input_shape))
        return torch.from_numpy(interface.valid(normal.astype(np.float32)))
    x, samples = blank_batch(module, input_shape), samples_of(module, input_shape)
    generator = torch.Generator().manual_seed(0)
    if samples.vocabulary is not None or not x.is_floating_point():
        ids = torch.randint(samples.vocabulary or 1, x.shape, generator=generator)
        return ids if samples.ids else ids.to(x.dtype)
    return torch.randn(x.shape, generator=generator)


def _outputs(module: nn.Module, x: Tensor) -> Tensor:
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            outputs: Tensor = module(x)
            return outputs
    finally:
        for part, training in modes:
            part.training = training


def _random_attributes(module: nn.Module, other: nn.Module) -> Iterator[str]:
    """Yield the plain tensor attributes that differ."""
    others = dict(other.named_modules())
    for path, part in module.named_modules():
        for attribute, value in vars(part).items():
            theirs = vars(others[path]).get(attribute) if path in others else None
            if isinstance(value, Tensor) and isinstance(theirs, Tensor) and not _same(value, theirs):
                yield f"tensor {f'{path}.{attribute}'.lstrip('.')}"


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _alike(one: Any, other: Any) -> bool:
    return torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)
