"""Rules of `coordinator.spec.neuron_trace` for recurrent layers (RNN, GRU, LSTM) and their cells.

A unit is one neuron. It owns its row in each gate of both weights and of the biases, and its column of the
recurrent weight. With all of these at 0 and a state that starts at 0, a unit's output stays 0.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fleetune.coordinator.spec.neurons import Neurons, flat


def _recurrent(
    neurons: Neurons,
    result: Sequence[Tensor],
    x: Tensor,
    start: Any,
    weights: Any,
    has_biases: Any,
    *settings: Any,
) -> list[Tensor]:
    """Numbers of all outputs and of the last states of several layers, each in one or two directions.

    Args:
        neurons: the neurons.
        result: the outputs, then the last states, as torch returns them.
        x: the samples.
        start: the first states; of an LSTM, a pair.
        weights: the parameters of each layer and direction, one after the other.
        has_biases: True if biases are among them.
        settings: number of layers, dropout, training mode, bidirectional, and batch_first.
    """
    if isinstance(start, Tensor) and not start.is_floating_point():  # sizes of the batches of packed samples
        start, weights, settings = weights, has_biases, settings[1:]
    num_layers, _, _, is_bidirectional, *_ = settings
    directions = 2 if is_bidirectional else 1
    states = [neurons.of(state) for state in flat(start)]
    each, positions = len(weights) // (num_layers * directions), x.numel() // x.shape[-1]
    inputs, last = neurons.along(x, -1), []
    for first in range(0, num_layers * directions, directions):
        both = []
        for index in range(first, first + directions):
            own = weights[index * each : (index + 1) * each]
            before = [neurons.merged(state[index].reshape(-1, state.shape[-1]), 0) for state in states]
            both.append(_units(neurons, inputs, before, own, positions))
        last += both
        inputs = torch.cat([outputs for outputs, _ in both])
    output, *ends = result
    kinds = zip(*last, strict=True)  # outputs, then cells
    return [
        neurons.layer(output, -1, inputs),
        *(
            torch.stack([neurons.layer(one, -1, own) for one, own in zip(end, numbers, strict=True)])
            for end, numbers in zip(ends, kinds, strict=False)
        ),
    ]


def _units(
    neurons: Neurons, inputs: Tensor, before: Sequence[Tensor], weights: Sequence[Tensor], positions: int
) -> tuple[Tensor, Tensor]:
    """Number a layer's units in one direction; return the numbers of its outputs and of its cells.

    The outputs are other neurons only if an LSTM projects its cells (`proj_size`).

    Args:
        neurons: the neurons.
        inputs: the neurons of the layer's inputs.
        before: the neurons of its first states: of its outputs, then of its cells.
        weights: weight_ih, weight_hh, then biases and the weight of the projection, where it has them.
        positions: number of samples times steps.
    """
    weight_ih, weight_hh, *others = weights
    projections = [one for one in others if one.ndim > 1]
    cells = neurons.new(projections[0].shape[1] if projections else weight_hh.shape[1])
    outputs = neurons.new(len(projections[0])) if projections else cells
    gates = cells.repeat(len(weight_ih) // len(cells))
    for weight in (weight_ih, weight_hh, *(one for one in others if one.ndim == 1)):
        neurons.own(weight, 0, gates)
    neurons.own(weight_ih, 1, inputs)
    neurons.own(weight_hh, 1, outputs)
    for weight in projections:
        neurons.own(weight, 0, outputs)
        neurons.own(weight, 1, cells)
    for weight in (weight_ih, weight_hh, *projections):
        neurons.use(weight, positions)
    for state, own in zip(before, (outputs, cells), strict=False):
        neurons.join(state, own)
    return outputs, cells


def _cell(
    neurons: Neurons, result: Any, x: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, *biases: Tensor | None
) -> list[Tensor]:
    """Numbers of one step of a recurrent layer."""
    before = [neurons.along(state, -1) for state in flat(hx)]
    weights = [w_ih, w_hh, *flat(biases)]
    outputs, _ = _units(neurons, neurons.along(x, -1), before, weights, x.numel() // x.shape[-1])
    return [neurons.layer(one, -1, outputs) for one in flat(result)]


RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("rnn_tanh", "rnn_relu", "gru", "lstm"), _recurrent),
    **dict.fromkeys(("rnn_tanh_cell", "rnn_relu_cell", "gru_cell", "lstm_cell"), _cell),
}
