"""Rules of `coordinator.spec.neuron_trace` for matrix products and attention.

A product sums over neurons, so these become one neuron with what they are multiplied by. In attention the
queries and keys of a head are multiplied and summed, then weigh the head's values. So its rows of all three
projections and its columns of the output projection are one neuron: the head. If there is only one head, each
entry of its queries is a neuron with the same entry of its keys, and each entry of its values is another.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fleetune.coordinator.spec.neurons import FIXED, FREE, Neurons, flat


def _matmul(neurons: Neurons, result: Tensor, x: Tensor, other: Tensor, **_: object) -> Tensor:
    """Numbers of a product of two activations, or of an activation with a weight."""
    if neurons.is_parameter(other) and other.ndim == 2 and not neurons.is_parameter(x):
        neurons.use(other, result.numel() // other.shape[1])
        neurons.own(other, 0, neurons.along(x, -1))
        numbers = neurons.new(other.shape[1])
        neurons.own(other, 1, numbers)
        return neurons.layer(result, -1, numbers)
    if min(x.ndim, other.ndim) < 2:
        neurons.fix((x, other))
        return neurons.of(result)
    return _product(neurons, neurons.of(x), neurons.of(other))


def _addmm(
    neurons: Neurons, result: Tensor, bias: Tensor, x: Tensor, weight: Tensor, **scales: object
) -> Tensor:
    """Numbers of a linear layer whose weight has its inputs on the first axis, as GPT-2's layers."""
    if not neurons.is_parameter(weight) or scales or bias.ndim != 1:
        neurons.fix((bias, x, weight))
        return neurons.of(result)
    numbers = _matmul(neurons, result, x, weight)
    neurons.own(bias, 0, numbers[0])
    return numbers


def _product(neurons: Neurons, x: Tensor, other: Tensor) -> Tensor:
    """Numbers of a product of activations. Inputs and constants only weigh the other factor's neurons."""
    rows, columns = x, other.transpose(-2, -1)
    shape = (*torch.broadcast_shapes(x.shape[:-2], other.shape[:-2]), x.shape[-2], other.shape[-1])  # type: ignore[no-untyped-call]
    if neurons.would_be_one(rows) and neurons.would_be_one(columns):
        first, second = (neurons.merged(one.reshape(-1, one.shape[-1]), 0) for one in (rows, columns))
        neurons.join(first, second)
        return torch.tensor(FREE).expand(shape)
    rows = neurons.merged(rows, -1).unsqueeze(-1).expand(shape)
    columns = neurons.merged(columns, -1).unsqueeze(-2).expand(shape)
    neurons.join(rows.where(rows != FIXED, FREE), columns.where(columns != FIXED, FREE))
    return torch.maximum(rows, columns)


def _scaled_dot_product_attention(
    neurons: Neurons,
    _: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *__: object,
    enable_gqa: bool = False,
    **___: object,
) -> Tensor:
    q, k, v = (neurons.of(one) for one in (query, key, value))
    if enable_gqa:
        k, v = (one.repeat_interleave(query.shape[-3] // one.shape[-3], -3) for one in (k, v))
    scores = _product(neurons, q, k.transpose(-2, -1))
    if attn_mask is not None:  # a mask from the samples changes which positions a head reads, not the heads
        mask = neurons.of(attn_mask).expand(scores.shape)
        neurons.join(scores, mask.where(mask != FIXED, FREE))
    return _product(neurons, scores, v)


def _multi_head_attention(
    neurons: Neurons,
    result: tuple[Tensor, Tensor | None],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    width: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    _: bool,
    __: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    *others: object,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    **more: object,
) -> list[Tensor]:
    """Numbers of `nn.MultiheadAttention`, whose three projections may be one parameter."""
    rows = neurons.new(num_heads).repeat_interleave(width // num_heads)
    own, use = neurons.own, neurons.use
    own(in_proj_weight, 0, rows.repeat(3))
    own(in_proj_bias, 0, rows.repeat(3))
    for x, weight in ((query, q_proj_weight), (key, k_proj_weight), (value, v_proj_weight)):
        own(weight, 0, rows)
        for one in flat((weight, in_proj_weight)):
            own(one, 1, neurons.along(x, -1))
    for bias in (bias_k, bias_v):
        own(bias, 2, rows)
    own(out_proj_weight, 1, rows)
    neurons.fix((others, more))  # masks
    positions = query.numel() // query.shape[-1]
    for one in flat((in_proj_weight, q_proj_weight, k_proj_weight, v_proj_weight, out_proj_weight)):
        use(one, positions)
    output, *scores = flat(result)
    numbers = neurons.layer(output, -1, neurons.new(width), out_proj_weight, out_proj_bias)
    return [numbers, *(torch.tensor(FIXED).expand(one.shape) for one in scores)]


RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("matmul", "bmm", "mm"), _matmul),
    "addmm": _addmm,
    "scaled_dot_product_attention": _scaled_dot_product_attention,
    "multi_head_attention_forward": _multi_head_attention,
}
