"""Classification: each sample is of one of several classes."""

import numpy as np

from fleetune.protocols.tasks import scores
from fleetune.protocols.tasks.losses import CROSS_ENTROPY
from fleetune.protocols.tasks.scores import Score
from fleetune.protocols.tasks.task import Array, Task, class_weights_fit, whole_classes


class Classification(Task):
    """Labels are class numbers from 0, int64, shape (n,); the model gives a logit for each class."""

    kind = "classification"
    losses = (CROSS_ENTROPY,)
    weighs_classes = True
    label_form = "classes"
    scores = (
        scores.ACCURACY,
        Score(
            "balanced_accuracy",
            "balanced accuracy",
            "Mean over the classes that occur of the fraction of them predicted correctly.",
            "higher",
        ),
        Score("macro_f1", "macro F1", "Mean F1 over the classes that occur or are predicted.", "higher"),
        Score(
            "auroc",
            "AUROC",
            "Probability that a sample of a class gets the larger logit for it, mean over classes.",
            "higher",
        ),
    )

    def num_outputs(self, _: tuple[int, ...], labels: Array) -> int:
        return int(labels.max()) + 1

    def checked(self, labels: Array, num_outputs: int, where: str) -> Array:
        class_weights_fit(self.section, num_outputs)
        return whole_classes(labels, num_outputs, where)

    def target_shape(self, _: int, __: tuple[int, ...]) -> tuple[int, ...]:
        return ()

    def _figure(self, name: str, judged: Array, labels: Array, _: Array | None) -> float | None:
        predicted = judged.argmax(axis=1)
        if name == "accuracy":
            return scores.accuracy(predicted, labels)
        if name == "balanced_accuracy":
            return scores.balanced_accuracy(predicted, labels)
        if name == "macro_f1":
            return scores.macro_f1(predicted, labels)
        return scores.mean_of([scores.auroc(judged[:, one], labels == one) for one in np.unique(labels)])
