"""What devices heed of run.toml's [adoption]: when they use a model that the fleet led to.

It travels in the enrolment. A run that was begun without it goes on without: devices serve as
`edge_agent.extensions.adoption.deployed_model` says.
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
        enabled: devices adopt a model only if it is not worse on their own held-out samples than the one in
            use and than what they would have by training alone; otherwise they keep what they have, and go on
            contributing. Off: the lowest validation loss is served, or without validation samples the newest.
        confidence: with which a model must be shown to be better than the one trained alone, in a one-sided
            paired test; 0.5: it is enough that its mean loss is lower.
        compare_alone: every so many of its rounds a device also trains a model on its samples alone, for one
            round's worth, and keeps it; 0: it trains none, and nothing is said about alone. With more than 1
            that takes less, and the model to beat has had less training.
        alone_on_all: a device that stays with the model it trained alone serves one that was trained on the
            held-out samples too, and is what it would have without a fleet; it is trained beside the one that
            is judged, which takes as much again. False: the one that is judged is served.
        held_out: of the training samples, held out on devices where `data.validation_fraction` is 0.
        half_life: of held-out samples in the order of the source: each so many before the newest halve what
            one counts; 0: all count alike.
        canary: share of the devices, at least one, that serve a new version of the shared model first; the
            others go on with the version before until theirs find it no worse. Devices then serve the shared
            model itself, and not their own after local training. 0: no roll-out groups.
        watch: how long a version stands with its canaries before it is judged: so many rounds, or a time
            such as "24h".
        regression: confidence with which more canaries than not must find a version worse, on their own
            held-out samples, for its roll-out to be stopped.
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
        """What devices hold out as validation samples, where [data] says `of_data`."""
        return self.held_out if self.enabled and not of_data else of_data
