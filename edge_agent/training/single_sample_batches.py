"""Training on one sample a batch: batch norms that have one value a channel use their running statistics."""

import numpy as np

from fleetune.edge_agent.training.backend import Backend
from fleetune.edge_agent.training.smaller_network import made_up_samples, synthetic_weights
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.randomness import Key

_NAMED = 3  # layers in a line


def has_single_batches(spec: ModelSpec, num_samples: int, batch_size: int) -> bool:
    """Whether a device trains on batches of one sample, with a model that has batch norms."""
    normed = any(tensor.kind == "stat" for tensor in spec.tensors)
    return normed and (num_samples == 1 or (num_samples > 1 and batch_size == 1))


def norms_with_fixed_statistics(backend: Backend) -> list[str]:
    """Names of the norms whose running statistics a step on one sample leaves as they are, and one on several
    moves. The backend's weights are overwritten.

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
    """Which device trains on single samples, and what its norms do then; "": nothing else than elsewhere.

    Args:
        who: has one training sample, in words.
        norms: of `norms_with_fixed_statistics`.
        batch_size: of the run.
    """
    if not norms:
        return ""
    why = "training.batch_size = 1" if batch_size == 1 else who
    more = f" and {len(norms) - _NAMED} more" if len(norms) > _NAMED else ""
    return f"{why}: BatchNorm uses its running statistics there ({', '.join(norms[:_NAMED])}{more})"
