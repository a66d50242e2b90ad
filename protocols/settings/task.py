"""Section [task] of run.toml: what a fleet learns. `protocols.tasks` implements the tasks."""

from typing import Annotated, Literal

from msgspec import Meta

from fleetune.protocols.bounds import MOST_CLASSES, Label, Positive
from fleetune.protocols.settings.section import Fraction, Settings

TaskKind = Literal["classification", "multi-label", "regression", "forecast", "reconstruction"]
Inside = Annotated[float, Meta(gt=0, lt=1)]


class TaskSection(Settings, frozen=True):
    """[task]

    Attributes:
        kind: `classification`: one of several classes. `multi-label`: any number of labels. `regression`:
            numbers. `forecast`: the next numbers of a series. `reconstruction`: the sample itself (an
            autoencoder, whose error indicates anomalies).
        loss: training loss: `cross-entropy`, `binary-cross-entropy`, `squared`, `absolute`, `huber`,
            `quantile`, or your own `package.module:function`. The function gets outputs and targets, torch
            tensors with the batch first, and returns one loss for each sample. Empty: the default of the
            kind.
        score: the metric that the fleet is judged by, one that the kind offers. Empty: the default of the
            kind.
        class_weights: weights of the classes in the loss; with several labels, the weight of a label's
            presence. Empty: all weigh the same.
        label_smoothing: fraction of each label that cross-entropy spreads over all classes.
        huber_delta: error up to which `huber` is quadratic; beyond it is linear.
        quantiles: quantiles that `quantile` predicts. The model gives one output for each target and
            quantile, in this order.
        anomaly_quantile: quantile of the errors on normal samples outside the training split. A sample with a
            larger error counts as an anomaly.
    """

    kind: TaskKind = "classification"
    loss: Label = ""
    score: Label = ""
    class_weights: Annotated[tuple[Positive, ...], Meta(max_length=MOST_CLASSES)] = ()
    label_smoothing: Fraction = 0.0
    huber_delta: Positive = 1.0
    quantiles: Annotated[tuple[Inside, ...], Meta(min_length=1, max_length=100)] = (0.5,)
    anomaly_quantile: Inside = 0.99
