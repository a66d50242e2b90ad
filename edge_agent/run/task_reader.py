"""Decodes tasks: from bytes to an `Assignment`, using the model that its values are differences to."""

from typing import Any

from msgspec import UNSET

from fleetune.edge_agent.run.shared_session_cache import SharedSessionCache
from fleetune.edge_agent.run.task_preview import TaskHeader, read_task_header
from fleetune.protocols.errors import PacketForeign, ReferenceModelUnknown
from fleetune.protocols.method.method import Method
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.update import codec
from fleetune.protocols.update.reference_model import ReferenceModel
from fleetune.protocols.wire.payloads import Assignment, Enrolment


class TaskReader:
    """Decodes the tasks of one device in one run.

    Args:
        enrolment: enrolment of the run.
        device: name of the device.
        method: made from the enrolment.
        shared: cache shared by the sessions of this process; None if there is only one session.
    """

    def __init__(
        self,
        enrolment: Enrolment,
        device: str,
        method: Method[Any, Any, Any, Any],
        shared: SharedSessionCache | None,
    ) -> None:
        self._enrolment, self._device, self._method, self._shared = enrolment, device, method, shared

    def read(self, data: bytes, held: FlatArray) -> Assignment[Any]:
        """Decode a task for this device.

        Args:
            data: the encoded `Assignment`.
            held: the weights that the device holds from earlier tasks, shape (spec.size,).

        Raises:
            PacketError: the task is damaged, or not for this device.
            ReferenceModelUnknown: its values are differences to a model that this device does not hold.
        """
        spec, shared = self._method.spec, self._shared
        assignment: Assignment[Any] = codec.decode(
            data,
            Assignment[self._method.task_type],  # type: ignore[name-defined]
            spec,
            limit=codec.payload_limit(spec),
            reference=lambda task: self._base(task, held),
            verified=shared is not None,
            decode_cache=None if shared is None else shared.tasks,
        )
        if assignment.device != self._device:
            raise PacketForeign(f"task for {assignment.device}; this is {self._device}")
        if (encoding := assignment.uplink or 0) >= (known := len(self._enrolment.uplinks)):
            raise PacketForeign(f"task for an update by encoding {encoding} of a run that has {known}")
        return assignment

    def header(self, data: bytes) -> TaskHeader:
        """Decode the fields of a task without its values. Raises PacketError."""
        return read_task_header(data, self._method.spec)

    def reference_after(self, assignment: Assignment[Any], held: FlatArray) -> ReferenceModel:
        """The model that both sides hold once this task has arrived."""
        if assignment.base is UNSET:
            return self.known(ReferenceModel.of_task(assignment.task, self._method.spec))
        return self.known(self._base(assignment, held).after(assignment.task, self._method.spec))

    def digest(self, weights: FlatArray) -> str:
        """Digest of a model that a task may be a difference to."""
        return self.known(ReferenceModel.whole(weights)).digest

    def known(self, reference: ReferenceModel) -> ReferenceModel:
        """Return `reference`, or the equal one that another session of this process has cached."""
        return reference if self._shared is None else self._shared.bases.known(reference)

    def _base(self, assignment: Assignment[Any], held: FlatArray) -> ReferenceModel:
        if assignment.base is UNSET:
            return ReferenceModel.nothing(self._method.spec)
        for weights in (held, self._enrolment.weights):
            reference = self.known(ReferenceModel.whole(weights))
            if reference.digest == assignment.base:
                return reference
        raise ReferenceModelUnknown(
            f"task of round {assignment.round} is a difference to what this device does not hold"
        )
