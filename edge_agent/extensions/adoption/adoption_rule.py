"""Base class of adoption rules. A rule evaluates models on the device's samples and chooses one to deploy."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from fleetune.edge_agent.extensions.adoption.decisions import Decision
from fleetune.edge_agent.extensions.adoption.deployed_model import DeployedModel, ModelRecord
from fleetune.edge_agent.extensions.adoption.paired_test import Losses
from fleetune.edge_agent.extensions.extension import RoundAttempt
from fleetune.edge_agent.extensions.local_only import LocalOnlyModel
from fleetune.protocols.model.spec import FlatArray


@dataclass(frozen=True)
class Evaluated:
    """A model and its results on the device's current samples.

    Attributes:
        record: origin and known metrics of the model.
        losses: loss of each held-out sample, shape (n,); None if the model cannot be evaluated on them.
        score: the task's first metric on the held-out samples, higher is better; None if not known.
        training_loss: loss on the current training samples; None if not needed.
    """

    record: ModelRecord
    losses: Losses | None = None
    score: float | None = None
    training_loss: float | None = None

    @property
    def known(self) -> ModelRecord:
        """Return the record, with the current training loss if it is known."""
        if self.training_loss is None:
            return self.record
        return replace(self.record, training_loss=self.training_loss)


@dataclass(frozen=True)
class Choice:
    """The model to deploy from now on.

    Attributes:
        used: the model to deploy.
        why: the reason in one line; empty if it is not recorded.
        best: the run's best checkpoint, if the session stores it.
        decision: the entry for `edge-agent models`; None if nothing is recorded.
    """

    used: Evaluated
    why: str = ""
    best: ModelRecord | None = None
    decision: Decision | None = None


class AdoptionRule(ABC):
    """Chooses which model a device deploys.

    Class attributes:
        has_versions: True if deployed models become numbered versions, one of which may be pinned.
    """

    has_versions: ClassVar[bool] = False

    @abstractmethod
    def evaluate_deployed(self, found: DeployedModel) -> Evaluated:
        """Evaluate the deployed model or a version on current samples that it was not trained on."""

    @abstractmethod
    def choose(
        self,
        candidates: Sequence[DeployedModel],
        in_use: Evaluated | None,
        best: ModelRecord | None,
        local_only: LocalOnlyModel | None,
        attempt: RoundAttempt,
    ) -> Choice | None:
        """Choose the model to deploy after a round; None if nothing changes or no model can be deployed yet.

        Args:
            candidates: the models that the round produced.
            in_use: the deployed model; None if no model is deployed.
            best: the best checkpoint of this run; None if there is none yet.
            local_only: the local-only model after this round; None if the run trains none.
            attempt: the round and its attempt.
        """

    def better_earlier(
        self,
        in_use: Evaluated,  # noqa: ARG002 - for rules that override it
        versions: Iterable[DeployedModel],  # noqa: ARG002
    ) -> tuple[Evaluated, FlatArray] | None:
        """Return the best of the earlier versions that are shown to be better than the deployed model,
        evaluated.

        Returns:
            The version; None if there is no such version, or if deployed models have no versions.
        """
        return None
