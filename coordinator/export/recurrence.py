"""Computes recurrent layers as loops over their steps, with explicit backward passes.

Only the states depend on earlier steps. Products with the inputs, and the gradients of the weights, are
computed for all steps at once; a loop computes the rest. In a trace, a loop is one operator
(`fleetune::scan`), whose step is a function here. Layers with projections are left to torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from fleetune.protocols.errors import ModelError

Tensors = Sequence[Tensor]
# A step takes the states, its entry of each scanned array, and arrays that are the same in each step. It
# returns the new states, and arrays that the loop collects.
Step = Callable[[Tensors, Tensors, Tensors], tuple[Tensors, Tensors]]


def _lstm(states: Tensors, scanned: Tensors, fixed: Tensors) -> tuple[Tensors, Tensors]:
    (hidden, cell), (x,), (weight,) = states, scanned, fixed
    i, f, g, o = torch.addmm(x, hidden, weight).chunk(4, 1)
    i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
    remembered = f * cell
    cell = remembered + i * g
    squashed = torch.tanh(cell)
    hidden = o * squashed
    return (hidden, cell), (hidden, i, f, g, o, remembered, squashed)


def _lstm_factors(before: Tensor, kept: Tensors) -> Tensors:
    hidden, i, f, g, o, remembered, squashed = kept
    of_cell = [i * g * (1 - i), remembered * (1 - f), i * (1 - g * g)]
    return o - hidden * squashed, f, torch.cat([*of_cell, hidden * (1 - o)], -1)


def _lstm_back(states: Tensors, scanned: Tensors, fixed: Tensors) -> tuple[Tensors, Tensors]:
    (hidden, cell), (given, to_cell, f, to_gates), (weight,) = states, scanned, fixed
    hidden = hidden + given
    cell = cell + hidden * to_cell
    gates = torch.cat([cell, cell, cell, hidden], 1) * to_gates
    return (gates @ weight, cell * f), (gates,)


def _gru(states: Tensors, scanned: Tensors, fixed: Tensors) -> tuple[Tensors, Tensors]:
    (hidden,), (x,), (weight, bias) = states, scanned, fixed
    of_hidden = torch.addmm(bias, hidden, weight).chunk(3, 1)
    of_x = x.chunk(3, 1)
    r, z = (torch.sigmoid(a + b) for a, b in zip(of_x[:2], of_hidden[:2], strict=True))
    n = torch.tanh(of_x[2] + r * of_hidden[2])
    hidden = n + z * (hidden - n)
    return (hidden,), (hidden, r, z, n, of_hidden[2])


def _gru_factors(before: Tensor, kept: Tensors) -> Tensors:
    _, r, z, n, of_hidden = kept
    new = (1 - z) * (1 - n * n)
    return z, new, torch.cat([new * of_hidden * r * (1 - r), (before - n) * z * (1 - z), new * r], -1)


def _gru_back(states: Tensors, scanned: Tensors, fixed: Tensors) -> tuple[Tensors, Tensors]:
    (hidden,), (given, z, new, to_gates), (weight,) = states, scanned, fixed
    hidden = hidden + given
    gates = torch.cat([hidden, hidden, hidden], 1) * to_gates
    of_x = torch.cat([gates[:, : 2 * hidden.shape[1]], hidden * new], 1)
    return (torch.addmm(hidden * z, gates, weight),), (gates, of_x)


def _plain(
    states: Tensors, scanned: Tensors, fixed: Tensors, *, activation: Callable[[Tensor], Tensor]
) -> tuple[Tensors, Tensors]:
    (hidden,), (x,), (weight,) = states, scanned, fixed
    hidden = activation(torch.addmm(x, hidden, weight))
    return (hidden,), (hidden,)


def _plain_back(states: Tensors, scanned: Tensors, fixed: Tensors) -> tuple[Tensors, Tensors]:
    (hidden,), (given, slope), (weight,) = states, scanned, fixed
    gates = (hidden + given) * slope
    return (gates @ weight,), (gates,)


@dataclass(frozen=True)
class Cell:
    """A kind of recurrent layer.

    Attributes:
        forward: a step; it collects the hidden state first, and what `factors` needs.
        factors: returns arrays for `backward`, computed for all steps at once from the hidden states before
            each step and from what `forward` collected.
        backward: a step of the backward pass, from the gradients of the states after a step to those before
            it. It scans the gradient of the hidden state and the factors. It collects the gradient of the
            gates' hidden part, and last that of their input part (one array if they are equal).
        gated_bias: True if a gate multiplies the bias of the hidden part, so that it cannot join that of the
            input part.
    """

    forward: Step
    factors: Callable[[Tensor, Tensors], Tensors]
    backward: Step
    gated_bias: bool = False


CELLS = {
    "lstm": Cell(_lstm, _lstm_factors, _lstm_back),
    "gru": Cell(_gru, _gru_factors, _gru_back, gated_bias=True),
    "rnn_tanh": Cell(
        partial(_plain, activation=torch.tanh), lambda _, kept: (1 - kept[0] * kept[0],), _plain_back
    ),
    "rnn_relu": Cell(
        partial(_plain, activation=torch.relu),
        lambda _, kept: ((kept[0] > 0).to(kept[0].dtype),),
        _plain_back,
    ),
}
STEPS: dict[str, Step] = {name: cell.forward for name, cell in CELLS.items()}
STEPS |= {f"{name} backward": cell.backward for name, cell in CELLS.items()}


def _scan(step: str, states: Tensors, scanned: Tensors, fixed: Tensors, reverse: bool) -> list[Tensor]:
    """Return the states after the last step, and the arrays that the loop collected, first axis the steps."""
    collected = []
    places = range(len(scanned[0]))
    for place in reversed(places) if reverse else places:
        states, found = STEPS[step](states, [one[place] for one in scanned], fixed)
        collected.append(found)
    ordered = collected[::-1] if reverse else collected
    return [*states, *(torch.stack(one) for one in zip(*ordered, strict=True))]


def _scan_of_shapes(
    step: str, states: Tensors, scanned: Tensors, fixed: Tensors, reverse: bool
) -> list[Tensor]:
    states, found = STEPS[step](states, [one[0] for one in scanned], fixed)
    return [*states, *(one.new_empty((len(scanned[0]), *one.shape)) for one in found)]


_LIBRARY: Any = torch.library.Library("fleetune", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("scan(str step, Tensor[] states, Tensor[] scanned, Tensor[] fixed, bool reverse) -> Tensor[]")
_LIBRARY.impl("scan", _scan, "CompositeExplicitAutograd")
torch.library.register_fake("fleetune::scan", _scan_of_shapes, lib=_LIBRARY)


class _Layer(Function):
    """Computes one direction of one layer over all steps: the hidden states, then the last states.

    `x` is the input part of the gates, of shape (steps, samples, gates); `bias` that of the hidden part, if a
    gate multiplies it.
    """

    @staticmethod
    def forward(
        ctx: Any, cell: str, reverse: bool, x: Tensor, weight: Tensor, bias: Tensor | None, *start: Tensor
    ) -> tuple[Tensor, ...]:
        fixed = [weight.t()] if bias is None else [weight.t(), bias]
        found = torch.ops.fleetune.scan(cell, start, [x], fixed, reverse)
        last, kept = found[: len(start)], found[len(start) :]
        ctx.cell, ctx.reverse, ctx.biased = cell, reverse, bias is not None
        ctx.save_for_backward(weight, start[0], *kept)
        return kept[0], *last

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        given, *last = gradients
        weight, start, *kept = ctx.saved_tensors
        hidden, start = kept[0], start.unsqueeze(0)
        before = torch.cat([hidden[1:], start] if ctx.reverse else [start, hidden[:-1]])
        factors = CELLS[ctx.cell].factors(before, kept)
        found = torch.ops.fleetune.scan(
            f"{ctx.cell} backward", last, [given, *factors], [weight], not ctx.reverse
        )
        first, collected = found[: len(last)], found[len(last) :]
        gates = collected[0].flatten(0, 1)
        of_weight, of_bias = gates.t() @ before.flatten(0, 1), gates.sum(0) if ctx.biased else None
        return None, None, collected[-1], of_weight, of_bias, *first


def _recurrent(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a recurrent function of torch returns: the last layer's output, and the last states."""
    if not isinstance(arguments[3], bool):
        raise ModelError(
            "the model cannot be exported: a recurrent layer reads a packed sequence, whose lengths depend on"
            " the data; give it padded samples, or let agents with torch train it"
        )
    x, start, weights, has_biases, num_layers, dropout, training, bidirectional, batch_first = arguments
    directions, each = 1 + bidirectional, 4 if has_biases else 2
    if len(weights) != num_layers * directions * each:  # it has projections
        return function(*arguments)
    starts = [start] if isinstance(start, Tensor) else start
    x = x.transpose(0, 1) if batch_first else x
    last = []
    for layer in range(num_layers):
        outputs = []
        for place in range(layer * directions, (layer + 1) * directions):
            own = weights[place * each : (place + 1) * each]
            output, *states = _direction(
                function.__name__, place % directions == 1, x, own, [one[place] for one in starts]
            )
            outputs.append(output)
            last.append(states)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and training and layer < num_layers - 1:
            x = torch.dropout(x, dropout, train=True)
    x = x.transpose(0, 1) if batch_first else x
    return x, *(torch.stack(one) for one in zip(*last, strict=True))


def _direction(cell: str, reverse: bool, x: Tensor, weights: Tensors, start: Tensors) -> tuple[Tensor, ...]:
    of_input, of_hidden, *biases = weights
    bias = biases[0] if biases else None
    hidden_bias = None
    if CELLS[cell].gated_bias:
        hidden_bias = biases[1] if biases else of_hidden.new_zeros(len(of_hidden))
    elif biases:
        bias = biases[0] + biases[1]
    rows = functional.linear(x.reshape(-1, x.shape[2]), of_input, bias)
    gates = rows.reshape(*x.shape[:2], len(of_hidden))
    found: tuple[Tensor, ...] = _Layer.apply(cell, reverse, gates, of_hidden, hidden_bias, *start)  # type: ignore[no-untyped-call]
    return found


RULES: dict[Any, Callable[..., Any]] = {
    function: partial(_recurrent, function)
    for function in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
}
