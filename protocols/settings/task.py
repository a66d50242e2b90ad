"""[task]: what a fleet learns; `protocols.tasks` makes it true."""

from typing import Annotated, Literal

from msgspec import Meta

from fleetune.protocols.bounds import MOST_CLASSES, Label, Positive
from fleetune.protocols.settings.section import Fraction, Settings

TaskKind = Literal["classification", "multi-label", "regression", "forecast", "reconstruction"]
Inside = Annotated[float, Meta(gt=0, lt=1)]


class TaskSection(Settings, frozen=True):
    """[task]

    Attributes:
        kind: `classification`, one of several classes; `multi-label`, any of them; `regression`, numbers;
            `forecast`, the numbers that come next; `reconstruction`, the sample itself (an autoencoder, whose
            error tells anomalies).
        loss: what training makes small: `cross-entropy`, `binary-cross-entropy`, `squared`, `absolute`,
            `huber`, `quantile`, or `package.module:function` of (outputs, targets), torch tensors with the
            batch first, that gives a loss for each sample; empty: the first that the kind has.
        score: the figure that the fleet is judged by, of those the kind has; empty: its first.
        class_weights: how much a sample of each class counts in the loss; of several labels, how much its
            presence does; empty: all alike.
        label_smoothing: of cross-entropy: this share of every label is spread over all classes.
        huber_delta: `huber` is quadratic up to here and linear beyond.
        quantiles: of `quantile`: the model gives so many numbers for each that is asked, in this order.
        anomaly_quantile: a sample is called an anomaly whose error is above this quantile of the errors of
            normal samples that the device did not train on.
    """

    kind: TaskKind = "classification"
    loss: Label = ""
    score: Label = ""
    class_weights: Annotated[tuple[Positive, ...], Meta(max_length=MOST_CLASSES)] = ()
    label_smoothing: Fraction = 0.0
    huber_delta: Positive = 1.0
    quantiles: Annotated[tuple[Inside, ...], Meta(min_length=1, max_length=100)] = (0.5,)
    anomaly_quantile: Inside = 0.99
