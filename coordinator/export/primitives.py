"""Computes normalisation and cross entropy with explicit backward passes, so that torch can trace them.

Otherwise torch would update running statistics in place, which a trace cannot record. The backward passes
would be single operators that ONNX lacks.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fleetune.coordinator.export import recurrence


class Cumulative(float):
    """A momentum value for running statistics that are means over all batches (torch's `momentum=None`)."""


class Primitives(TorchFunctionMode):
    """Context in which norms and cross entropy run step by step, in operators that can be traced.

    Attributes:
        new: the running statistics after this step, by name.
    """

    def __init__(self, statistics: dict[str, Tensor], batches: Tensor | None = None) -> None:
        """Prepare the context.

        Args:
            statistics: the running statistics, by name.
            batches: the number of training steps, this one included; None if no norm averages over all
                batches.
        """
        super().__init__()
        self._names = {id(tensor): name for name, tensor in statistics.items()}
        self._batches = batches
        self.new: dict[str, Tensor] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        if rule is None:
            bare: Callable[..., Any] = _BARE_RULES.get(func, func)
            return bare(*args, **kwargs)
        call = inspect.signature(func).bind(*args, **kwargs)
        call.apply_defaults()
        return rule(self, **call.arguments)

    def note(
        self, running: Tensor | None, batch: Tensor, momentum: float, single: Tensor | None = None
    ) -> None:
        """Record a running statistic's new value: `momentum` of the batch's value, the rest of the old value.

        Channels that `single` marks have one value in the batch; they keep the old value.
        """
        name = self._names.get(id(running))
        if running is None or name is None:
            return
        old = self.new.get(name, running)
        share: float | Tensor = momentum
        if isinstance(momentum, Cumulative):
            assert self._batches is not None
            share = 1 / self._batches
        moved = old * (1 - share) + batch * share
        self.new[name] = moved if single is None else torch.where(single, old, moved)

    def current(self, running: Tensor) -> Tensor:
        """Return the running statistic, with the updates of earlier calls in the same step."""
        return self.new.get(self._names.get(id(running), ""), running)


# For a batch norm whose channels may have a single value each: a flag for that, the running mean and the
# running variance, in shapes that broadcast.
Single = tuple[Tensor, Tensor, Tensor]


class _Standardised(Function):
    """Computes (x - mean) / sqrt(variance + eps) * weight + bias over `axes`, with an explicit backward pass.

    Also returns the mean and the biased variance. `weight` and `bias` have one value for each normalised
    group, in a shape that broadcasts. Where `single` is True, a group has one value; its mean and variance
    are then the running ones, as constants.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        axes: list[int],
        eps: float,
        single: Single | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        mean = x.mean(axes, keepdim=True)
        if single is not None:
            mean = torch.where(single[0], single[1], mean)
        centred = x - mean
        variance = (centred * centred).mean(axes, keepdim=True)
        if single is not None:
            variance = torch.where(single[0], single[2], variance)
        inverse = torch.rsqrt(variance + eps)
        scale = inverse if weight is None else inverse * weight
        result = centred * scale
        ctx.save_for_backward(centred, inverse, scale, *(() if single is None else single[:1]))
        ctx.axes, ctx.affine = axes, weight is not None
        ctx.mark_non_differentiable(mean, variance)
        return result if bias is None else result + bias, mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = gradients[0]
        centred, inverse, scale, *single = ctx.saved_tensors
        product = gradient * centred
        total = gradient.sum(ctx.axes, keepdim=True)
        along = product.sum(ctx.axes, keepdim=True)
        count = 1
        for axis in ctx.axes:
            count = count * centred.shape[axis]
        slope = scale * inverse * inverse * along / count
        offset = scale * total / count
        if single:
            slope, offset = (torch.where(single[0], torch.zeros_like(one), one) for one in (slope, offset))
        found = gradient * scale - (centred * slope + offset)
        return found, along * inverse if ctx.affine else None, total if ctx.affine else None, None, None, None


class _CrossEntropy(Function):
    """Computes the mean over samples of -log softmax at the labels, with an explicit backward pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        logs = torch.log_softmax(logits, 1)
        hot = (labels[:, None] == torch.arange(logits.shape[1])).to(logits.dtype)
        ctx.save_for_backward(logits, hot)
        return -(logs * hot).sum() / len(logits)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        logits, hot = ctx.saved_tensors
        return (torch.softmax(logits, 1) - hot) * (gradients[0] / len(logits)), None


def _cross_entropy(mode: Primitives, input: Tensor, target: Tensor, **_: object) -> Tensor:  # noqa: A002
    loss: Tensor = _CrossEntropy.apply(input, target)  # type: ignore[no-untyped-call]
    return loss


def _per_channel(vector: Tensor | None, x: Tensor) -> Tensor | None:
    return None if vector is None else _channelwise(vector, x)


def _channelwise(vector: Tensor, x: Tensor) -> Tensor:
    """Return the vector in a shape that broadcasts over the channels of x."""
    return vector.reshape(1, -1, *[1] * (x.ndim - 2))


def _batch_norm(
    mode: Primitives,
    input: Tensor,  # noqa: A002
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    x, scale, shift = input, _per_channel(weight, input), _per_channel(bias, input)
    if training:
        axes = [axis for axis in range(x.ndim) if axis != 1]
        count = x.numel() // x.shape[1]
        single, rest = None, None
        # each channel may have one value only, namely in a batch of one, which has no variance
        if running_mean is not None and running_var is not None and count == len(x):
            single = torch.full((), count, dtype=torch.float32) == 1
            mean, variance = (mode.current(one) for one in (running_mean, running_var))
            rest = single, _channelwise(mean, x), _channelwise(variance, x)
        y, mean, variance = _affine(x, scale, shift, axes, eps, rest)
        mode.note(running_mean, mean.reshape(-1), momentum, single)
        mode.note(running_var, variance.reshape(-1) * count / (count - 1), momentum, single)
        return y
    assert running_mean is not None
    assert running_var is not None
    mean, variance = mode.current(running_mean), mode.current(running_var)
    inverse = torch.rsqrt(variance + eps)
    factor = inverse if weight is None else inverse * weight
    y = (x - _channelwise(mean, x)) * _channelwise(factor, x)
    return y if shift is None else y + shift


def _affine(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    axes: list[int],
    eps: float,
    single: Single | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the input standardised over `axes`, then scaled and shifted; also the mean and variance."""
    found: tuple[Tensor, Tensor, Tensor]
    if weight is not None and bias is not None:
        found = _Standardised.apply(x, weight, bias, axes, eps, single)  # type: ignore[no-untyped-call]
        return found
    found = _Standardised.apply(x, None, None, axes, eps, single)  # type: ignore[no-untyped-call]
    return _scaled(found[0], weight, bias), *found[1:]


def _group_norm(
    mode: Primitives,
    input: Tensor,  # noqa: A002
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    rows = input.reshape(len(input), num_groups, -1)
    y, _, _ = _affine(rows, None, None, [2], eps)
    return _scaled(y.reshape(input.shape), _per_channel(weight, input), _per_channel(bias, input))


def _layer_norm(
    mode: Primitives,
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    axes = list(range(input.ndim - len(normalized_shape), input.ndim))
    y, _, _ = _affine(input, None, None, axes, eps)
    return _scaled(y, weight, bias)


def _instance_norm(
    mode: Primitives,
    input: Tensor,  # noqa: A002
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    if not use_input_stats:
        return _batch_norm(mode, input, running_mean, running_var, weight, bias, False, 0.0, eps)
    axes = list(range(2, input.ndim))
    y, mean, variance = _affine(input, None, None, axes, eps)
    count = 1
    for axis in axes:
        count = count * input.shape[axis]
    mode.note(running_mean, mean.reshape(input.shape[:2]).mean(0), momentum)
    if running_var is not None:
        mode.note(running_var, variance.reshape(input.shape[:2]).mean(0) * (count / (count - 1)), momentum)
    return _scaled(y, _per_channel(weight, input), _per_channel(bias, input))


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = x if weight is None else x * weight
    return y if bias is None else y + bias


def _rms_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    axes = list(range(input.ndim - len(normalized_shape), input.ndim))
    floor = torch.finfo(input.dtype).eps if eps is None else eps
    y = input * torch.rsqrt((input * input).mean(axes, keepdim=True) + floor)
    return y if weight is None else y * weight


def _embedding_bag(
    primitives: Primitives,
    /,
    input: Tensor,  # noqa: A002
    weight: Tensor,
    **settings: Any,
) -> Tensor:
    usual = input.ndim == 2 and not any(
        settings[name] is not None for name in ("max_norm", "per_sample_weights", "padding_idx", "offsets")
    )
    if not usual or settings["mode"] == "max":
        return functional.embedding_bag(input, weight, **settings)
    rows = functional.embedding(input, weight)
    return rows.sum(1) if settings["mode"] == "sum" else rows.mean(1)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _adaptive_max_pool2d(
    input: Tensor,  # noqa: A002
    output_size: Any,
    return_indices: bool = False,
) -> Tensor:
    """Return the largest entry of each window; sizes differ if the output does not divide the input."""
    sizes = output_size if isinstance(output_size, (tuple, list)) else (output_size, output_size)
    rows, columns = (
        [(place * size // wanted, -(-(place + 1) * size // wanted)) for place in range(wanted)]
        for size, wanted in (
            (size, wanted or size) for size, wanted in zip(input.shape[-2:], sizes, strict=True)
        )
    )
    cells = [
        input[..., top:end, left:right].flatten(-2).max(-1).values
        for top, end in rows
        for left, right in columns
    ]
    return torch.stack(cells, -1).reshape(*input.shape[:-2], len(rows), len(columns))


def _adaptive_avg_pool2d(input: Tensor, output_size: Any) -> Tensor:  # noqa: A002
    # torch computes a mean too, and then changes the layout of some results in place, which a trace loses
    if output_size in (1, (1, 1), [1, 1]):
        return input.mean((-1, -2), keepdim=True)
    return functional.adaptive_avg_pool2d(input, output_size)


def _affine_grid(theta: Tensor, size: Sequence[int], align_corners: bool | None = None) -> Tensor:
    if len(size) != 4:
        return functional.affine_grid(theta, list(size), align_corners)
    height, width = size[2:]
    down, across = (
        (2 * torch.arange(count, dtype=theta.dtype) + (0 if align_corners else 1))
        / (count - 1 if align_corners else count)
        - 1
        for count in (height, width)
    )
    places = torch.stack(
        [across.expand(height, width), down[:, None].expand(height, width), torch.ones(height, width)], -1
    )
    return (places.reshape(-1, 3) @ theta.transpose(1, 2)).reshape(-1, height, width, 2)


def _grid_sample(
    input: Tensor,  # noqa: A002
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Tensor:
    if input.ndim != 4 or mode != "bilinear" or padding_mode == "reflection":
        return functional.grid_sample(input, grid, mode, padding_mode, align_corners)
    rows, places = input.flatten(2), []
    for size, at in zip(input.shape[:1:-1], grid.unbind(-1), strict=True):  # across, then down
        place = (at + 1) * (size - 1) / 2 if align_corners else ((at + 1) * size - 1) / 2
        places.append(place.clamp(0, size - 1) if padding_mode == "border" else place)
    corners = []
    for right in (0, 1):
        for lower in (0, 1):
            share, indices = torch.ones_like(places[0]), []
            for size, place, further in zip(input.shape[:1:-1], places, (right, lower), strict=True):
                low = place.detach().floor()
                cell, part = low + further, place - low
                share = share * (part if further else 1 - part) * ((cell >= 0) & (cell <= size - 1))
                indices.append(cell.clamp(0, size - 1).long())
            index = (indices[1] * input.shape[-1] + indices[0]).flatten(1).unsqueeze(1)
            found = rows.gather(2, index.expand(-1, rows.shape[1], -1))
            corners.append(found * share.flatten(1).unsqueeze(1))
    total = corners[0] + corners[1] + corners[2] + corners[3]
    return total.reshape(*input.shape[:2], *grid.shape[1:3])


_BARE_RULES: dict[Any, Callable[..., Tensor]] = {
    functional.rms_norm: _rms_norm,
    torch._weight_norm: _weight_norm,  # noqa: SLF001 - what parametrizations.weight_norm calls
    functional.adaptive_max_pool2d: _adaptive_max_pool2d,
    functional.adaptive_avg_pool2d: _adaptive_avg_pool2d,
    functional.affine_grid: _affine_grid,
    functional.grid_sample: _grid_sample,
    **recurrence.RULES,
}
_RULES: dict[Callable[..., Any], Callable[..., Tensor]] = {
    functional.cross_entropy: _cross_entropy,
    functional.batch_norm: _batch_norm,
    functional.group_norm: _group_norm,
    functional.layer_norm: _layer_norm,
    functional.instance_norm: _instance_norm,
    functional.embedding_bag: _embedding_bag,
}


def is_cumulative(part: nn.Module) -> bool:
    """True if a norm's running statistics are means over all batches."""
    return getattr(part, "num_batches_tracked", None) is not None and getattr(part, "momentum", 0) is None
