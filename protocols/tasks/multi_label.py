"""Multi-label classification: each sample has any number of labels."""

import numpy as np

from fleetune.protocols.errors import DataError
from fleetune.protocols.tasks import scores
from fleetune.protocols.tasks.losses import BINARY
from fleetune.protocols.tasks.scores import Score
from fleetune.protocols.tasks.task import Array, Task, class_weights_fit, numbers


class MultiLabel(Task):
    """Labels are 0 and 1, shape (n, labels); the model gives a logit for each, with threshold 0."""

    kind = "multi-label"
    losses = (BINARY,)
    weighs_classes = True
    scores = (
        Score("macro_f1", "macro F1", "Mean F1 over the labels that occur or are predicted.", "higher"),
        Score(
            "auroc", "AUROC", "Probability that a sample with a label gets the larger logit, mean.", "higher"
        ),
        Score("label_accuracy", "label accuracy", "Fraction of all labels predicted correctly.", "higher"),
        Score("exact_match", "exact match", "Fraction of samples with every label correct.", "higher"),
    )

    def num_outputs(self, _: tuple[int, ...], labels: Array) -> int:
        return int(np.prod(labels.shape[1:]))

    def checked(self, labels: Array, num_outputs: int, where: str) -> Array:
        class_weights_fit(self.section, num_outputs)
        found = numbers(labels, num_outputs, where)
        if not np.isin(found, (0, 1)).all():
            raise DataError(
                f"{where}: labels other than 0 and 1; a multi-label task needs 0 or 1 for each label"
            )
        return found

    def _figure(self, name: str, judged: Array, labels: Array, _: Array | None) -> float | None:
        predicted, there = judged > 0, labels > 0
        if name == "macro_f1":
            return scores.macro_f1_of_many(predicted, there)
        if name == "label_accuracy":
            return float((predicted == there).mean())
        if name == "exact_match":
            return float((predicted == there).all(axis=1).mean())
        return scores.mean_of([scores.auroc(judged[:, k], there[:, k]) for k in range(there.shape[1])])
