"""Training with one sample a batch. Batch norms with one value per channel use running statistics."""

import numpy as np

from fleetune.edge_agent.training.backend import Backend
from fleetune.edge_agent.training.smaller_network import made_up_samples, synthetic_weights
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.randomness import Key

_NAMED = 3  # most norms that a line names


def has_single_batches(spec: ModelSpec, num_samples: int, batch_size: int) -> bool:
    """True if a device trains on batches of one sample with a model that has batch norms."""
    normed = any(tensor.kind == "stat" for tensor in spec.tensors)
    return normed and (num_samples == 1 or (num_samples > 1 and batch_size == 1))


def norms_with_fixed_statistics(backend: Backend) -> list[str]:
    """Names of the norms whose running statistics change in a step on several samples, but not on one.

    Overwrites the backend's weights.

    Raises:
        ModelError: the backend cannot train on one sample.
    """
    spec, weights = backend.spec, synthetic_weights(backend.spec)
    x, y = made_up_samples(backend)
    moved = []
    for count in (1, len(y)):
        backend.load(weights)
        backend.step(x[:count], y[:count], Key(0))
        after = backend.weights
        moved.append(
            {
                tensor.layer
                for tensor in spec.tensors
                if tensor.kind == "stat"
                and not np.array_equal(after[spec.slices[tensor.name]], weights[spec.slices[tensor.name]])
            }
        )
    layers = dict.fromkeys(tensor.layer for tensor in spec.tensors if tensor.kind == "stat")
    return [layer for layer in layers if layer in moved[1] - moved[0]]


def describe_single_batches(who: str, norms: list[str], batch_size: int) -> str:
    """One line that says which devices train on single samples and what their norms do. "": nothing differs.

    Args:
        who: words for the devices with one training sample.
        norms: names from `norms_with_fixed_statistics`.
        batch_size: the run's batch size.
    """
    if not norms:
        return ""
    why = "training.batch_size = 1" if batch_size == 1 else who
    more = f" and {len(norms) - _NAMED} more" if len(norms) > _NAMED else ""
    return f"{why}: BatchNorm uses its running statistics there ({', '.join(norms[:_NAMED])}{more})"
