"""One device in one run: takes a task and returns a reply. All I/O uses the memory object that it is given.

A reply is stored together with the new state, in one write. So after any crash the same task gets the same
reply, and no training is repeated.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from msgspec import UNSET

from fleetune.edge_agent.extensions.extension import ExtensionChain, RunStart
from fleetune.edge_agent.extensions.order import extensions_of
from fleetune.edge_agent.extensions.session_state import HELD_MODEL, RESIDUAL, SessionState, State, recall
from fleetune.edge_agent.run.local_round import LocalRound
from fleetune.edge_agent.run.shared_session_cache import SharedSessionCache
from fleetune.edge_agent.run.task_reader import TaskReader
from fleetune.edge_agent.run.update_writer import UpdateWriter
from fleetune.edge_agent.state.agent_store import Memory
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.protocols.errors import ReferenceModelUnknown
from fleetune.protocols.method.choice import Budget
from fleetune.protocols.method.method import Method
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.update import codec
from fleetune.protocols.update.encodings import RAW
from fleetune.protocols.update.masks.coding_time import CodingTime
from fleetune.protocols.update.reference_model import ReferenceModel
from fleetune.protocols.update.shared_payload_cache import PayloadContent
from fleetune.protocols.wire.payloads import Assignment, Enrolment, proposed_budget


@dataclass(frozen=True)
class WorkDone:
    """The work and the encoding of the last reply.

    Attributes:
        local_work: share of the run's local training that was done; None if the reply was stored before.
        compression_error: relative compression error of the task's encoding, see `RoundCost`.
        sent: the decoded values of the reply, for readers in this process; None if they must decode it.
    """

    local_work: float | None = None
    compression_error: float | None = None
    sent: PayloadContent | None = None


class Session:
    """A device in one run.

    Args:
        enrolment: enrolment of the run.
        device: name of this device.
        method: made from the enrolment.
        trainer: the device's model and data.
        memory: where the state is stored.
        extensions: the run's extensions on this device; None for the extensions that need no files.
        own: function that returns the device's own starting model, or None for the shared model; called when
            the run starts.
        keep_replies: True to store the bytes of the last reply; a simulation does not need them.
        shared: cache shared by the sessions of this process; None if there is only one session.

    Attributes:
        done: work and encoding of the last reply.
    """

    def __init__(
        self,
        enrolment: Enrolment,
        device: str,
        method: Method[Any, Any, Any, Any],
        trainer: LocalTrainer,
        memory: Memory,
        *,
        extensions: ExtensionChain | None = None,
        own: Callable[[], FlatArray | None] = lambda: None,
        keep_replies: bool = True,
        shared: SharedSessionCache | None = None,
    ) -> None:
        if extensions is None:
            extensions = extensions_of(RunStart(enrolment, trainer))
        self._enrolment, self._device, self._method = enrolment, device, method
        self._memory, self._keep_replies = memory, keep_replies
        self._tasks = TaskReader(enrolment, device, method, shared)
        self._local = LocalRound(enrolment, device, method, trainer, extensions)
        self._updates = UpdateWriter(enrolment, device, method, tells=shared is not None)
        self._recall = partial(recall, enrolment, method, memory, extensions, own)
        self._take_over(self._recall())
        self._evaluated: tuple[int, int, bytes] | None = None
        self._asks_whole = False
        self.done = WorkDone()

    @property
    def spec(self) -> ModelSpec:
        return self._method.spec

    @property
    def num_samples(self) -> int:
        """Number of training samples."""
        return self._local.trainer.num_samples

    @property
    def last_round(self) -> int:
        """The last round that the device worked in; 0 before the first."""
        return self._state.round

    @property
    def personal_model(self) -> FlatArray:
        """The device's own model, shape (spec.size,)."""
        return self._method.personal_model(self._state.state)

    @property
    def base(self) -> str | None:
        """Digest of the model to which the next task may be a difference; None for no differences.

        This is the model that the device has. After a task that could not be read, it is the run's initial
        model.
        """
        if self._enrolment.downlink.name == RAW:
            return None
        return (self._tasks.whole(self._enrolment.weights) if self._asks_whole else self._held).digest

    def reply(
        self,
        data: bytes,
        budget: Budget,
        enough: Callable[[], bool] = lambda: False,
        mask_time: CodingTime | None = None,
    ) -> bytes:
        """Do a task within the device's limits and return the encoded `Reply`; details are in `done`.

        Args:
            data: the encoded `Assignment`.
            budget: limits of the device.
            enough: local training ends early once this returns True.
            mask_time: time that the device needs to code a mask; None to ignore time.

        Raises:
            PacketError: the task is damaged, or not for this device.
            ReferenceModelUnknown: the task holds differences to a model that this device does not hold.
                Nothing was changed. Until the next task is done, `base` is the digest of the initial weights,
                so that the coordinator can send a readable task.
            TrainingStopped: the agent stops; nothing was changed.
            TrainingDiverged: training diverged, or the method's numbers are not finite; nothing was changed.
            MethodError: the method's `work` failed, or its result cannot be stored; nothing was changed.
            StoreError: the new state could not be written; nothing was changed.
        """
        self.done = WorkDone()
        try:
            assignment = self._tasks.read(data, self._held)
        except ReferenceModelUnknown:
            header = self._tasks.header(data)
            if header.device == self._device and self._has_replied(header.round, header.attempt):
                return self._last_reply()
            self._asks_whole = True
            raise
        del data  # up to a whole model, which is not needed while the task is done
        if self._has_replied(assignment.round, assignment.attempt):
            return self._last_reply()
        if self._evaluated and (assignment.round, assignment.attempt) == self._evaluated[:2]:
            return self._evaluated[2]
        budget = _within(budget, assignment)
        if assignment.final_evaluation:
            return self._evaluate(assignment, budget)
        return self._work(assignment, budget, enough, mask_time)

    def _take_over(self, state: State, held: ReferenceModel | None = None) -> None:
        """Continue from a stored state. Its reply stays in the memory only.

        Args:
            state: the state.
            held: the model in its slot `HELD_MODEL`, if it is at hand as a reference.
        """
        self._state, self._keeps_reply = replace(state, reply=b""), bool(state.reply)
        held = held or self._tasks.whole(state.slots.get(HELD_MODEL, self._enrolment.weights))
        self._held = held  # the model to which tasks may be differences

    def _has_replied(self, round_: int, attempt: int) -> bool:
        return self._keeps_reply and (round_, attempt) == (self._state.round, self._state.attempt)

    def _last_reply(self) -> bytes:
        return self._recall().reply

    def _work(
        self,
        assignment: Assignment[Any],
        budget: Budget,
        enough: Callable[[], bool],
        mask_time: CodingTime | None,
    ) -> bytes:
        base = self._tasks.reference_after(assignment, self._held)
        if assignment.base is not UNSET:  # the old model goes now, as training needs the memory
            slots = {name: one for name, one in self._state.slots.items() if name != HELD_MODEL}
            self._state, self._held = replace(self._state, slots=slots), base
        try:
            return self._work_from(base, assignment, budget, enough, mask_time)
        except BaseException:
            self._take_over(self._recall())
            raise

    def _work_from(
        self,
        base: ReferenceModel,
        assignment: Assignment[Any],
        budget: Budget,
        enough: Callable[[], bool],
        mask_time: CodingTime | None,
    ) -> bytes:
        """Do a task when the device holds the model `base`; return the reply."""
        result = self._local.work(assignment, budget, self._state, enough)
        residual = self._state.slots.get(RESIDUAL)
        written = self._updates.write(assignment, result, base, budget.uplink, residual, mask_time)
        slots = {name: one for name, one in result.slots.items() if name != RESIDUAL}
        if written.residual is not None:
            slots[RESIDUAL] = written.residual
        if assignment.base is not UNSET:
            slots[HELD_MODEL] = base.values
        reply, run = written.data if self._keep_replies else b"", self._state.run
        state: State = SessionState(run, result.state, assignment.round, assignment.attempt, reply, slots)
        stored: Any = replace(state, reply=codec.Blob(reply))  # type: ignore[arg-type]
        self._memory.write(codec.encode_own(stored, self.spec, plain=self._memory.plain))
        self._asks_whole = False
        self._take_over(state, base if assignment.base is not UNSET else self._held)
        self.done = WorkDone(result.local_work, written.compression_error, written.sent)
        return written.data

    def _evaluate(self, assignment: Assignment[Any], budget: Budget) -> bytes:
        """Do a final evaluation on a copy of the state, of which nothing is stored; return the reply."""
        result = self._local.work(assignment, budget, self._state)
        data = self._updates.write_measures(assignment, result.measures)
        self._evaluated = assignment.round, assignment.attempt, data
        return data


def _within(budget: Budget, assignment: Assignment[Any]) -> Budget:
    """Return the smaller of the device's own budget and the task's proposal."""
    proposed = proposed_budget(assignment.ratio, assignment.local_work, assignment.uplink)
    if proposed is None:
        return budget
    ratio, local_work = min(budget.ratio, proposed.ratio), min(budget.local_work, proposed.local_work)
    return Budget(ratio, local_work, max(budget.uplink, proposed.uplink))
