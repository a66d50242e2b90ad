"""Reconstruction: an autoencoder learns what is normal, and its error detects anomalies."""

import math

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.errors import DataError, SettingError
from fleetune.protocols.tasks import scores
from fleetune.protocols.tasks.anomaly_threshold import threshold_of
from fleetune.protocols.tasks.scores import Score
from fleetune.protocols.tasks.task import Array, Task, as_classes

NORMAL, ANOMALY = 0, 1


class Reconstruction(Task):
    """The model reproduces the flattened sample in its own input form. A sample's error is its loss.

    Labels mark anomalies (1) and normal samples (0), shape (n,); without labels all are taken as normal.
    Anomalies are used for testing, never for training.
    """

    kind = "reconstruction"
    label_form = "optional"
    targets_are_samples = True
    losses = ("squared", "absolute", "huber")
    scores = (
        Score("error", "error", "Mean reconstruction loss of the normal samples.", "lower", share=False),
        Score(
            "auroc",
            "AUROC",
            "Probability that an anomaly has the larger error than a normal sample.",
            "higher",
        ),
        Score("auprc", "AUPRC", "Area under precision over recall of anomalies, ranked by error.", "higher"),
        Score(
            "precision",
            "precision",
            "Share of anomalies among the samples above the device's threshold.",
            "higher",
        ),
        Score("recall", "recall", "Share of the anomalies that are above the device's threshold.", "higher"),
    )

    by_reference = frozenset({"precision", "recall"})  # scores that need errors of held-out samples

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.users_loss:
            raise SettingError(
                f"task.loss: reconstruction cannot use a loss of yours; choose {', '.join(self.losses)}"
            )

    def num_outputs(self, input_shape: tuple[int, ...], _: Array) -> int:
        return math.prod(input_shape)

    def checked(self, labels: Array, num_outputs: int, where: str) -> Array:  # noqa: ARG002
        if labels.shape[1:] == (0,):  # the source has no labels
            return np.zeros(len(labels), np.int64)
        labels = as_classes(labels)
        if labels.ndim != 1 or not np.isin(labels, (NORMAL, ANOMALY)).all():
            raise DataError(
                f"{where}: labels other than 0 (normal) and 1 (anomaly); reconstruction needs these"
            )
        return labels.astype(np.int64, copy=False)

    def trained_on(self, labels: Array) -> NDArray[np.bool_] | None:
        """Mark the normal samples; None if all are normal."""
        return None if not labels.any() else labels == NORMAL

    def targets(self, inputs: Array, labels: Array) -> Array:  # noqa: ARG002
        """Return the samples themselves, flattened."""
        return inputs.reshape(len(inputs), -1)

    def target_shape(self, num_outputs: int, input_shape: tuple[int, ...]) -> tuple[int, ...]:  # noqa: ARG002
        return (math.prod(input_shape),)

    def judged(self, outputs: Array, targets: Array) -> Array:
        """Return each sample's error, shape (n,)."""
        return self.sample_losses(outputs, targets)

    def threshold(self, reference: NDArray[np.float64]) -> float:
        """Return the error above which a sample is an anomaly.

        Args:
            reference: errors of at least one normal sample of the device, shape (n,).
        """
        return threshold_of(reference, self.section.anomaly_quantile)

    def _figure(self, name: str, judged: Array, labels: Array, reference: Array | None) -> float | None:
        anomalous = labels == ANOMALY
        if name == "error":
            return float(judged[~anomalous].mean()) if not anomalous.all() else None
        if name == "auroc":
            return scores.auroc(judged, anomalous)
        if name == "auprc":
            return scores.average_precision(judged, anomalous) if not anomalous.all() else None
        if reference is None or not reference.size or not anomalous.any():
            return None
        found = judged > self.threshold(reference)
        among = found if name == "precision" else anomalous
        return float((found & anomalous).sum() / among.sum()) if among.any() else None
