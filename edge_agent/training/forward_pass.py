"""A torch module's forward pass: from samples, or from cached features of its frozen layers."""

import numpy as np
from torch import Tensor

from fleetune.edge_agent.training import frozen_layers
from fleetune.edge_agent.training.backend import InputArray
from fleetune.edge_agent.training.flat_module import FlatModule
from fleetune.protocols.errors import ModelError
from fleetune.protocols.model.torch_failures import failing_part


class ForwardPass:
    """Computes logits with a module.

    Args:
        model: the module.
        replay: how to start from features. None: the inputs are samples.
    """

    def __init__(self, model: FlatModule, replay: frozen_layers.Replay | None = None) -> None:
        self._model, self.replay = model, replay

    def logits(self, x: InputArray) -> Tensor:
        """The module's output in its present mode, shape (n, outputs).

        Raises:
            ModelError: the output has another shape, or the module's calls depend on its samples.
        """
        if self.replay is None:
            return self._checked(self._model.module(self._model.inputs(x)), len(x))
        try:
            logits = self.replay.forward(self._model.module, np.asarray(x, np.float32))
        except frozen_layers.ReplayDiffers:
            raise ModelError(
                f"model {self._model.spec.name}: its calls depend on its samples, so its frozen layers"
                " cannot be skipped; let it call the same functions for all samples"
            ) from None
        return self._checked(logits, len(x))

    def above_frozen_layers(self) -> "ForwardPass | None":
        """The forward pass that starts from the frozen layers' features. None: there is none."""
        if self.replay is not None:
            return None
        replay = frozen_layers.record_boundary(self._model.module, self._model.synthetic_samples)
        return None if replay is None else ForwardPass(self._model, replay)

    def failing_part(self, x: InputArray) -> tuple[str, str] | None:
        """Name and error of the submodule that fails on these samples. None: unknown."""
        return None if self.replay is not None else failing_part(self._model.module, self._model.inputs(x))

    def _checked(self, logits: Tensor, num_samples: int) -> Tensor:
        spec = self._model.spec
        wanted = num_samples, spec.num_classes
        if logits.shape != wanted:
            raise ModelError(
                f"model {spec.name} returns shape {tuple(logits.shape)} for a batch of {num_samples};"
                f" expected {wanted}: write flatten(1) where it calls squeeze()"
            )
        return logits
