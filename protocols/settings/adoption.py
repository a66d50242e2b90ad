"""Section [adoption] of run.toml: when a device starts to use a model that the fleet trained.

The enrolment carries the section to the devices. In a run that began without it, a device chooses the model
as `edge_agent.extensions.adoption.deployed_model` describes.
"""

from typing import Annotated

from msgspec import Meta

from fleetune.protocols.bounds import MAX_NUMBER
from fleetune.protocols.settings.schedule import seconds_of_span
from fleetune.protocols.settings.section import Count, Fraction, Settings

Confidence = Annotated[float, Meta(ge=0.5, lt=1)]


class AdoptionSection(Settings, frozen=True, omit_defaults=True):
    """[adoption]

    Attributes:
        enabled: a device adopts a new model only if two comparisons on its own held-out samples allow it. The
            new model must be no worse than the deployed one and no worse than a model trained on the device's
            data alone. Otherwise the device keeps its model and goes on contributing updates. Without this
            rule a device deploys the model with the lowest validation loss, or the newest one if it has no
            validation samples.
        confidence: confidence of the one-sided paired test that a model is better than the local-only model.
            With 0.5 a lower mean loss is enough.
        compare_alone: rounds between two trainings of the local-only model. In such a round a device also
            trains a model on its own samples alone, as long as the shared one, and keeps it. 0: no local-only
            model and no comparison with it. A larger number saves computation, but the local-only model has
            then had less training.
        alone_on_all: a device that prefers its local-only model deploys one that was also trained on the
            held-out samples. This second model costs as much training again as the one that is compared.
            `false`: the compared model is deployed.
        held_out: fraction of the training samples that a device holds out if `data.validation_fraction` is 0.
        half_life: number of held-out samples, counted back from the newest in the order of the source, after
            which a sample's weight is halved. 0: all samples have the same weight.
        canary: fraction of the devices, at least one, that deploy a new version of the shared model first
            (canaries). The other devices keep the previous version until the canaries find the new one no
            worse. Devices then deploy the shared model itself, without local training on top. 0: no canaries.
        watch: how long canaries use a version before it is judged: a number of rounds, or a time such as
            "24h".
        regression: confidence with which most canaries must find a version worse on their held-out samples
            before its roll-out is stopped.
    """

    enabled: bool = False
    confidence: Confidence = 0.9
    compare_alone: Annotated[int, Meta(ge=0, le=MAX_NUMBER)] = 1
    alone_on_all: bool = True
    held_out: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    half_life: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    canary: Fraction = 0.0
    watch: Count | Annotated[str, Meta(max_length=16)] = 3
    regression: Confidence = 0.9

    def __post_init__(self) -> None:
        if isinstance(self.watch, str):
            seconds_of_span(self.watch, "watch")
        if self.canary and not self.enabled:
            raise ValueError("canary needs enabled = true: canaries judge by held-out samples")

    def validation_fraction(self, of_data: float) -> float:
        """Fraction of the training samples that a device holds out.

        Args:
            of_data: the fraction in section [data], which has priority.
        """
        return self.held_out if self.enabled and not of_data else of_data
