"""What a rule of adoption is: it evaluates models on the device's samples and chooses the one to deploy."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

from fleetune.edge_agent.extensions.adoption.decisions import Decision
from fleetune.edge_agent.extensions.adoption.deployed_model import DeployedModel, ModelRecord
from fleetune.edge_agent.extensions.adoption.paired_test import Losses
from fleetune.edge_agent.extensions.extension import RoundAttempt
from fleetune.edge_agent.extensions.local_only import LocalOnlyModel


@dataclass(frozen=True)
class Evaluated:
    """A model, and how it does on the device's samples of today.

    Attributes:
        record: what is known of it.
        losses: by held-out sample, shape (n,); None: it cannot be evaluated on them.
        score: on them, by the task's first metric, higher is better; None: not known.
        training_loss: on the training samples of today; None: not needed.
    """

    record: ModelRecord
    losses: Losses | None = None
    score: float | None = None
    training_loss: float | None = None

    @property
    def known(self) -> ModelRecord:
        """The record with the training loss of today, where that is known."""
        if self.training_loss is None:
            return self.record
        return replace(self.record, training_loss=self.training_loss)


@dataclass(frozen=True)
class Choice:
    """The model to deploy from now on.

    Attributes:
        used: that model.
        why: in one line; "": it is not noted.
        best: the best checkpoint of the run, where the session keeps that.
        decision: for `edge-agent models`; None: nothing is noted.
    """

    used: Evaluated
    why: str = ""
    best: ModelRecord | None = None
    decision: Decision | None = None


class AdoptionRule(Protocol):
    """Chooses which model a device deploys.

    Class attributes:
        has_versions: the deployed models become numbered versions, one of which may be pinned.
    """

    has_versions: ClassVar[bool]

    def evaluate_deployed(self, found: DeployedModel) -> Evaluated:
        """The deployed model or a version, evaluated on the samples of today as far as that is honest."""
        ...

    def choose(
        self,
        candidates: Sequence[DeployedModel],
        in_use: Evaluated | None,
        best: ModelRecord | None,
        local_only: LocalOnlyModel | None,
        attempt: RoundAttempt,
    ) -> Choice | None:
        """The model to deploy after a round; None: none is fit to be deployed yet, or all stays.

        Args:
            candidates: the models that the round led to.
            in_use: the deployed model; None: there is none.
            best: the best checkpoint of this run; None: there is none yet.
            local_only: the local-only model after this round; None: none is trained.
            attempt: of the round.
        """
        ...

    def earlier_is_better(self, earlier: Evaluated, in_use: Evaluated) -> bool:
        """Whether an earlier version is shown to be better than the one in use."""
        ...

    def mean_loss(self, one: Evaluated) -> float:
        """On the held-out samples."""
        ...

    def worse_by(self, one: Evaluated, other: Evaluated) -> str:
        """How much more `one` loses than `other`, for people; "": not known."""
        ...
