"""One device in one run: assignment in, reply out. No I/O but through the store it is given.

The personal model and the method's device state live here. A reply is kept with the state it led to, in
one write: the same assignment, asked again after any crash, gets the same reply and trains nothing twice.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from msgspec import UNSET, UnsetType

from fleetune.edge_agent.extensions.adoption.deployed_model import Memory, Serving
from fleetune.edge_agent.extensions.local_only import LocalOnlyModel, RoundAttempt, train_local_only
from fleetune.edge_agent.extensions.releases import Releases
from fleetune.edge_agent.extensions.session_state import Kept, first_local_only, recall
from fleetune.edge_agent.run.observed_trainer import EvaluatingTrainer, ObservedTrainer
from fleetune.edge_agent.run.shared_session_cache import SharedSessionCache
from fleetune.edge_agent.run.task_preview import read_task_header
from fleetune.edge_agent.training.optimisers.optimiser_memory import OptimiserMemory, States
from fleetune.protocols.bounds import LARGEST_LOSS
from fleetune.protocols.errors import BaseUnknown, PacketForeign, TrainingDiverged
from fleetune.protocols.finite import not_finite
from fleetune.protocols.method import steps
from fleetune.protocols.method.choice import Budget
from fleetune.protocols.method.method import Method
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.update import codec
from fleetune.protocols.update.base import Base
from fleetune.protocols.update.encodings import RAW
from fleetune.protocols.update.masks.coding_time import CodingTime
from fleetune.protocols.update.once import Told
from fleetune.protocols.update.patch_values import PatchWriter
from fleetune.protocols.wire.payloads import Assignment, Enrolment, Measures, Reply, proposed_budget, work_key
from fleetune.protocols.wire.release import ReleaseWord

D = TypeVar("D")


class Session:
    """A device in one run.

    Args:
        enrolment: of the run.
        device: this device's name.
        method: made from the enrolment.
        trainer: the device's model and data.
        memory: where to keep the state.
        adoption: of the models that the work leads to, decides which is served; None: nobody asks.
        own: the device's model to begin with instead of the common one, asked when the run begins.
        keep_replies: keep the bytes of the last reply; a simulation has no need of them.
        beside: of sessions that are played one after the other in this process; None: it is a device's own.
    """

    def __init__(
        self,
        enrolment: Enrolment,
        device: str,
        method: Method[Any, Any, Any, Any],
        trainer: EvaluatingTrainer,
        memory: Memory,
        *,
        adoption: Serving | None = None,
        own: Callable[[], FlatArray | None] = lambda: None,
        keep_replies: bool = True,
        beside: SharedSessionCache | None = None,
    ) -> None:
        self._enrolment = enrolment
        self._device = device
        self._method = method
        self._trainer = trainer
        self._memory = memory
        self._keep_replies, self._beside = keep_replies, beside
        self._evaluated: tuple[int, int, bytes] | None = None
        self.local_work: float | None = None
        self.left_out: float | None = None
        self.sent: Told | None = None
        self._kept = recall(enrolment, method, memory, own)
        self._asks_whole = False
        self._adoption = adoption
        if adoption is not None:
            adoption.resume(self._kept.best)

    @property
    def spec(self) -> ModelSpec:
        return self._method.spec

    @property
    def num_samples(self) -> int:
        """Training samples."""
        return self._trainer.num_samples

    @property
    def last_round(self) -> int:
        """The last round that it worked in; 0: none."""
        return self._kept.round

    @property
    def personal_model(self) -> FlatArray:
        """The device's own model, shape (spec.size,)."""
        return self._method.personal_model(self._kept.state)

    def reply(
        self,
        data: bytes,
        budget: Budget,
        enough: Callable[[], bool] = lambda: False,
        mask_time: CodingTime | None = None,
    ) -> bytes:
        """Do the work of `data`, an encoded `Assignment`, within what the device allows; the encoded `Reply`.

        `local_work` is the share of local training that was done then; None: none was, the reply was there.
        `left_out` is the share of its change that the encoding which the task asks for left for later (see
        `RoundCost`). `sent`, where sessions work beside each other, is what the reply says; None: nobody is
        told.

        Args:
            data: the task.
            budget: what the device allows.
            enough: local training ends with what it has when this says so.
            mask_time: what the code of a mask takes of the device; None: it is no matter.

        Raises:
            PacketError: the assignment is damaged, or not for this device.
            BaseUnknown: it is a difference to what this device does not hold; nothing was changed. Until the
                next task is done, `base` is that of the first weights: what comes then can be read.
            TrainingStopped: the agent stops; nothing was changed.
            TrainingDiverged: training diverged, or the method's numbers are not finite; nothing was changed.
            MethodError: the method's `work` failed, or returned what cannot be kept; nothing was changed.
            StoreError: the new state could not be written; nothing was changed.
        """
        self.local_work = self.left_out = self.sent = None
        try:
            assignment = self._read(data)
        except BaseUnknown:
            if self._is_done(data):
                return self._kept.reply
            self._asks_whole = True
            raise
        asked = proposed_budget(assignment.ratio, assignment.local_work, assignment.uplink)
        if asked is not None:
            ratio, local_work = min(budget.ratio, asked.ratio), min(budget.local_work, asked.local_work)
            budget = Budget(ratio, local_work, max(budget.uplink, asked.uplink))
        number, attempt = assignment.round, assignment.attempt
        if (number, attempt) == (self._kept.round, self._kept.attempt) and self._kept.reply:
            return self._kept.reply
        if self._evaluated and (number, attempt) == self._evaluated[:2]:
            return self._evaluated[2]
        return (
            self._evaluate(assignment, budget)
            if assignment.final_evaluation
            else self._work(assignment, budget, enough, mask_time)
        )

    def _work(
        self,
        assignment: Assignment[Any],
        budget: Budget,
        enough: Callable[[], bool],
        mask_time: CodingTime | None,
    ) -> bytes:
        optimiser_states = self._optimiser_states(self._kept.optimiser)
        done = self._do(assignment, budget, optimiser_states, enough)
        self.local_work = done.local_work
        state, measures = done.state, done.measures
        if self._adoption is not None:
            measures = replace(measures, **{**self._adoption.told(done.alone), "kept": UNSET})
        base = self._base_after(assignment)
        writer = self._writer(assignment, base, budget, mask_time)
        reply = Reply(
            device=self._device,
            round=assignment.round,
            attempt=assignment.attempt,
            leaving=self._method.finished(state),
            measures=measures,
            update=done.update,
            base=UNSET if writer is None else writer.base_digest,
        )
        encoded = codec.encode(reply, self.spec, writer=writer, compact=self._enrolment.compact is True)
        self.left_out = None if writer is None else writer.left_over
        if self._beside is not None and writer is not None:
            self.sent = writer.told(done.update)
        self._keep(
            Kept(
                self._enrolment.run,
                state,
                assignment.round,
                assignment.attempt,
                encoded if self._keep_replies else b"",
                None if self._adoption is None else self._adoption.best,
                UNSET if optimiser_states is None else optimiser_states.after,
                UNSET if done.alone is None else done.alone,
                done.releases,
                UNSET if writer is None or writer.left_out is None else writer.left_out,
                self._kept.held if assignment.base is UNSET else base.values,
            )
        )
        return encoded

    def _base_after(self, assignment: Assignment[Any]) -> Base:
        """What both sides hold when this task is here."""
        if assignment.base is UNSET:
            return self._known(Base.of_task(assignment.task, self.spec))
        return self._known(self._base_of(assignment).after(assignment.task, self.spec))

    def _writer(
        self, assignment: Assignment[Any], base: Base, budget: Budget, mask_time: CodingTime | None
    ) -> PatchWriter | None:
        """Of the values of an update, as run and task want them; None: as they are."""
        encoding, residual = self._enrolment.uplinks[budget.uplink], self._kept.residual
        if encoding.name == RAW and residual is UNSET:
            return None
        turn = assignment.round, assignment.attempt
        key = work_key(self._enrolment.seed, *turn, self._device).child("encoding")
        as_asked = assignment.uplink == budget.uplink  # who sends less than that says nothing of it
        waited = None if residual is UNSET else residual
        return PatchWriter(encoding, self.spec, key, base, waited, measures=as_asked, mask_time=mask_time)

    def _evaluate(self, assignment: Assignment[Any], budget: Budget) -> bytes:
        done = self._do(assignment, budget, self._optimiser_states(self._kept.optimiser))
        measures = done.measures
        personal, scores = self._judged(self.personal_model)
        measures = replace(measures, personal=personal, scores=scores)
        if self._enrolment.asks_validation is True:
            measures = replace(measures, validation=self._trainer.score(self.personal_model, "validation"))
        if self._adoption is not None:
            measures = replace(measures, **self._adoption.told(done.alone))
        reply: Reply[Any] = Reply(self._device, assignment.round, assignment.attempt, False, measures, None)
        encoded = codec.encode(reply, self.spec, compact=self._enrolment.compact is True)
        self._evaluated = assignment.round, assignment.attempt, encoded
        return encoded

    def _optimiser_states(self, before: States | UnsetType) -> OptimiserMemory | None:
        """To go on from, where the run has them kept."""
        if self._enrolment.training.optimiser_state == "round":
            return None
        return OptimiserMemory(() if before is UNSET else before)

    def _do(
        self,
        assignment: Assignment[Any],
        budget: Budget,
        optimiser_states: OptimiserMemory | None,
        enough: Callable[[], bool] = lambda: False,
    ) -> "_Done":
        turn = _turn(assignment)
        trainer = self._trainer.in_round(
            assignment.round, optimiser_states, local_work=budget.local_work, enough=enough
        )
        observed = ObservedTrainer(trainer, self._offer_start(assignment))
        key = work_key(self._enrolment.seed, assignment.round, assignment.attempt, self._device)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # found and named below
            state, update = steps.work(self._method, self._kept.state, assignment.task, observed, budget, key)
        self._check_finite(state, update)
        local_work = budget.local_work if observed.local_work is None else observed.local_work
        loss = observed.train_loss
        if loss is not None and not loss <= LARGEST_LOSS:
            raise TrainingDiverged(f"training diverged (loss is {loss:g}): lower training.learning_rate")
        personal = self._method.personal_model(state)
        after, scores = self._judged(personal)
        alone = self._alone_after(turn, key)
        releases = self._releases_after(assignment, personal)
        word: ReleaseWord | UnsetType = UNSET
        if self._adoption is not None:
            if releases is UNSET:
                self._adoption.offer(personal, turn, after, training_loss=observed.train_loss)
            else:
                word = self._offer_release(self._adoption, releases)
            self._adoption.settle(turn, alone)
        measures = Measures(
            num_samples=self._trainer.num_samples,
            num_test=self._trainer.num_test,
            train_loss=loss,
            before=observed.before,
            after=after,
            scores=scores,
            release=word,
            local_work=UNSET if local_work == 1 else local_work,
        )
        return _Done(state, update, measures, alone, releases, local_work)

    def _releases_after(self, assignment: Assignment[Any], personal: FlatArray) -> Releases | UnsetType:
        """The shared model's versions that the device holds from now on; UNSET: the run has no roll-out."""
        if assignment.release is UNSET:
            return UNSET
        return self._releases_before.taken_in(assignment.release, personal, self.spec)

    @property
    def _releases_before(self) -> Releases:
        kept = self._kept.releases
        return Releases() if kept is UNSET else kept

    def _offer_release(self, adoption: Serving, releases: Releases) -> ReleaseWord:
        """The newest version takes the place of the personal model; a withdrawn one goes."""
        withdrawn = releases.withdrawn(self._releases_before)
        if withdrawn:
            adoption.withdraw(withdrawn)
        newest = releases.newest
        if newest is not None:
            score = self._trainer.score(newest.weights)
            adoption.offer(newest.weights, RoundAttempt(newest.number, 0), score)
        return adoption.found_of(releases)

    def _alone_after(self, turn: RoundAttempt, key: Key) -> LocalOnlyModel | None:
        """The model trained alone after this round; None: the run asks for none."""
        every = 0 if self._adoption is None else self._adoption.compare_alone
        if not every:
            return None
        kept = self._kept.alone
        alone = first_local_only(self._enrolment) if kept is UNSET else kept
        assert alone is not None, "a run that compares says so in its enrolment"
        states = self._optimiser_states(alone.optimiser)
        return train_local_only(alone, turn, every, self._trainer.in_round(turn.round, states), key, states)

    def _judged(self, weights: FlatArray) -> tuple[float | None, dict[str, float] | UnsetType]:
        """A model's score on the test split, and all of them where the run has a [task]."""
        if self._enrolment.task is UNSET:
            return self._trainer.score(weights), UNSET
        scores = self._trainer.scores(weights)
        return scores.get(self._trainer.task.score.name), scores

    def _offer_start(self, assignment: Assignment[Any]) -> Callable[[FlatArray, float | None], None]:
        """In a final evaluation, what local training starts from is a candidate too."""
        adoption = self._adoption
        if adoption is None or not assignment.final_evaluation or assignment.release is not UNSET:
            return lambda *_: None
        return lambda weights, accuracy: adoption.offer(weights, _turn(assignment), accuracy, trained=False)

    def _check_finite(self, state: Any, update: Any) -> None:
        found = not_finite(update, "update") or not_finite(state, "state")
        if found:
            name = self._enrolment.method["name"]
            raise TrainingDiverged(
                f"method {name}: {found} is not finite after local training: lower training.learning_rate"
            )

    def _read(self, data: bytes) -> Assignment[Any]:
        kind = Assignment[self._method.task_type]  # type: ignore[name-defined]
        assignment: Assignment[Any] = codec.decode(
            data,
            kind,
            self.spec,
            limit=codec.payload_limit(self.spec),
            base=self._base_of,
            verified=self._beside is not None,
            read_before=None if self._beside is None else self._beside.tasks,
        )
        if assignment.device != self._device:
            raise PacketForeign(f"task for {assignment.device}; this is {self._device}")
        if (asked := assignment.uplink or 0) >= (known := len(self._enrolment.uplinks)):
            raise PacketForeign(f"task for an update by encoding {asked} of a run that has {known}")
        return assignment

    def _base_of(self, assignment: Assignment[Any]) -> Base:
        """What a task was written with. Raises BaseUnknown: this device does not hold it."""
        if assignment.base is UNSET:
            return Base.nothing(self.spec)
        for weights in (self._held, self._enrolment.weights):
            base = self._known(Base.whole(weights))
            if base.digest == assignment.base:
                return base
        raise BaseUnknown(
            f"task of round {assignment.round} is a difference to what this device does not hold"
        )

    @property
    def _held(self) -> FlatArray:
        held = self._kept.held
        return self._enrolment.weights if held is UNSET else held

    @property
    def base(self) -> str | None:
        """The digest of the model that the next task may be a difference to; None: the run sends none.

        It is what the device holds, or the run's first weights after a task that it could not read.
        """
        if self._enrolment.downlink.name == RAW:
            return None
        return self._known(Base.whole(self._enrolment.weights if self._asks_whole else self._held)).digest

    def _known(self, base: Base) -> Base:
        return base if self._beside is None else self._beside.bases.known(base)

    def _is_done(self, data: bytes) -> bool:
        """Whether it has replied to this task: what that was written with is no longer held then."""
        turn = read_task_header(data, self.spec)
        done = turn.device, turn.round, turn.attempt
        return bool(self._kept.reply) and done == (self._device, self._kept.round, self._kept.attempt)

    def _keep(self, kept: Kept[Any]) -> None:
        self._memory.write(codec.encode(kept, self.spec, own=True, plain=self._memory.plain))
        self._kept, self._asks_whole = kept, False


def _turn(assignment: Assignment[Any]) -> RoundAttempt:
    return RoundAttempt(assignment.round, assignment.attempt, assignment.final_evaluation)


@dataclass(frozen=True)
class _Done:
    """What a round's work came to: see `Kept` and `Reply`."""

    state: Any
    update: Any
    measures: Measures
    alone: LocalOnlyModel | None
    releases: Releases | UnsetType
    local_work: float
