"""Decodes tasks from bytes to an `Assignment`, with the model to which the values are differences."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec import UNSET, UnsetType

from fleetune.edge_agent.run.shared_session_cache import SharedSessionCache
from fleetune.protocols.bounds import FleetName, LocalWork, Number, Positive, Ratio, Uplink
from fleetune.protocols.errors import PacketError, PacketForeign, ReferenceModelUnknown
from fleetune.protocols.method.choice import Budget
from fleetune.protocols.method.method import Method
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.update import codec
from fleetune.protocols.update.reference_model import ReferenceModel
from fleetune.protocols.wire.payloads import Assignment, Enrolment, proposed_budget


class TaskPreview(NamedTuple):
    """The budget and the time that an `Assignment` proposes.

    Attributes:
        budget: ratio, local training and encoding; None if the device chooses.
        span_s: duration allowed for the round, in seconds; None if not known.
    """

    budget: Budget | None = None
    span_s: float | None = None


def preview_task(data: bytes, spec: ModelSpec) -> TaskPreview:
    """Return the preview of an encoded `Assignment`; an empty preview if it cannot be read."""
    try:
        header = read_task_header(data, spec)
    except PacketError:
        return TaskPreview()
    span_s = None if header.span_s is UNSET else header.span_s
    return TaskPreview(proposed_budget(header.ratio, header.local_work, header.uplink), span_s)


def read_task_header(data: bytes, spec: ModelSpec) -> "TaskHeader":
    return codec.decode(data, TaskHeader, spec, limit=codec.payload_limit(spec))


@dataclass(frozen=True)
class TaskHeader:
    """The fields of an `Assignment` without its task."""

    device: FleetName
    round: Number
    attempt: Number
    ratio: Ratio | UnsetType = UNSET
    local_work: LocalWork | UnsetType = UNSET
    span_s: Positive | UnsetType = UNSET
    uplink: Uplink | UnsetType = UNSET


@dataclass(frozen=True)
class TaskReader:
    """Decodes the tasks of one device in one run.

    Attributes:
        enrolment: enrolment of the run.
        device: name of the device.
        method: made from the enrolment.
        shared: cache shared by the sessions of this process; None if there is only one session.
    """

    enrolment: Enrolment
    device: str
    method: Method[Any, Any, Any, Any]
    shared: SharedSessionCache | None

    def read(self, data: bytes, held: ReferenceModel) -> Assignment[Any]:
        """Decode a task for this device.

        Args:
            data: the encoded `Assignment`.
            held: the model that the device holds from earlier tasks.

        Raises:
            PacketError: the task is damaged, or not for this device.
            ReferenceModelUnknown: its values are differences to a model that this device does not hold.
        """
        spec, shared = self.method.spec, self.shared
        assignment: Assignment[Any] = codec.decode(
            data,
            Assignment[self.method.task_type],  # type: ignore[name-defined]
            spec,
            limit=codec.payload_limit(spec),
            reference=lambda task: self._base(task, held),
            verified=shared is not None,
            decode_cache=None if shared is None else shared.tasks,
        )
        if assignment.device != self.device:
            raise PacketForeign(f"the task is for device {assignment.device}, but this is {self.device}")
        if (encoding := assignment.uplink or 0) >= (known := len(self.enrolment.uplinks)):
            raise PacketForeign(f"the task asks for update encoding {encoding}, but the run has {known}")
        return assignment

    def header(self, data: bytes) -> TaskHeader:
        """Decode the fields of a task without its values. Raises PacketError."""
        return read_task_header(data, self.method.spec)

    def reference_after(self, assignment: Assignment[Any], held: ReferenceModel) -> ReferenceModel:
        """Return the model that both sides hold once this task has arrived."""
        reference = ReferenceModel.of_task(assignment.task, self.method.spec)
        if assignment.base is not UNSET and not reference.held.all():
            reference = self._base(assignment, held).after(assignment.task, self.method.spec)
        return self.known(reference)

    def whole(self, weights: FlatArray) -> ReferenceModel:
        """Return the reference model with these weights, to which a task may be a difference."""
        return self.known(ReferenceModel.whole(weights))

    def known(self, reference: ReferenceModel) -> ReferenceModel:
        """Return `reference`, or the equal one that another session of this process has cached."""
        return reference if self.shared is None else self.shared.bases.known(reference)

    def _base(self, assignment: Assignment[Any], held: ReferenceModel) -> ReferenceModel:
        if assignment.base is UNSET:
            return ReferenceModel.nothing(self.method.spec)
        if held.digest == assignment.base:
            return held
        first = self.whole(self.enrolment.weights)
        if first.digest == assignment.base:
            return first
        raise ReferenceModelUnknown(
            f"the task of round {assignment.round} is a difference to a model that this device does not have"
        )
