"""Encodes replies: the update's values plus the residual of earlier updates, by the task's encoding."""

from dataclasses import dataclass
from typing import Any

from msgspec import UNSET

from fleetune.edge_agent.run.local_round import RoundResult
from fleetune.protocols.method.method import Method
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.update import codec
from fleetune.protocols.update.encodings import RAW
from fleetune.protocols.update.masks.coding_time import CodingTime
from fleetune.protocols.update.patch_values import PatchWriter
from fleetune.protocols.update.reference_model import ReferenceModel
from fleetune.protocols.update.shared_payload_cache import PayloadContent
from fleetune.protocols.wire.payloads import Assignment, Enrolment, Measures, Reply, work_key


@dataclass(frozen=True)
class WrittenReply:
    """An encoded reply.

    Attributes:
        data: the bytes of the reply.
        residual: new residual of error feedback, shape (spec.size,); None if the run uses none.
        compression_error: relative compression error of the task's encoding; None if not known.
        sent: the decoded values of the reply, for readers in this process; None if they must decode it.
    """

    data: bytes
    residual: FlatArray | None = None
    compression_error: float | None = None
    sent: PayloadContent | None = None


class UpdateWriter:
    """Encodes the replies of one device in one run.

    Args:
        enrolment: enrolment of the run.
        device: name of the device.
        method: made from the enrolment.
        tells: True if readers in this process receive the decoded values of each reply.
    """

    def __init__(
        self, enrolment: Enrolment, device: str, method: Method[Any, Any, Any, Any], *, tells: bool
    ) -> None:
        self._enrolment, self._device, self._method, self._tells = enrolment, device, method, tells

    def write(
        self,
        assignment: Assignment[Any],
        result: RoundResult,
        reference: ReferenceModel,
        uplink: int,
        residual: FlatArray | None,
        mask_time: CodingTime | None,
    ) -> WrittenReply:
        """Encode the reply to a round's task.

        Args:
            assignment: the task.
            result: result of the round's work.
            reference: the model that both sides hold.
            uplink: index of the encoding in `Enrolment.uplinks`.
            residual: compression error of earlier updates, shape (spec.size,); None for none.
            mask_time: time that the device needs to code a mask; None to ignore time.
        """
        writer = self._patch_writer(assignment, reference, uplink, residual, mask_time)
        reply = Reply(
            device=self._device,
            round=assignment.round,
            attempt=assignment.attempt,
            leaving=self._method.finished(result.state),
            measures=result.measures,
            update=result.update,
            base=UNSET if writer is None else writer.reference_digest,
        )
        data = codec.encode(reply, self._method.spec, writer=writer, compact=self._compact)
        if writer is None:
            return WrittenReply(data)
        sent = writer.content(result.update) if self._tells else None
        return WrittenReply(data, writer.next_residual, writer.compression_error, sent)

    def write_measures(self, assignment: Assignment[Any], measures: Measures) -> bytes:
        """Encode the reply to a final evaluation, which carries no update."""
        reply: Reply[Any] = Reply(self._device, assignment.round, assignment.attempt, False, measures, None)
        return codec.encode(reply, self._method.spec, compact=self._compact)

    @property
    def _compact(self) -> bool:
        return self._enrolment.compact is True

    def _patch_writer(
        self,
        assignment: Assignment[Any],
        reference: ReferenceModel,
        uplink: int,
        residual: FlatArray | None,
        mask_time: CodingTime | None,
    ) -> PatchWriter | None:
        """Return the writer of the update's values; None if they are written without an encoding."""
        encoding = self._enrolment.uplinks[uplink]
        if encoding.name == RAW and residual is None:
            return None
        key = work_key(self._enrolment.seed, assignment.round, assignment.attempt, self._device)
        # a device that uses another encoding than the task's reports no compression error
        as_asked = assignment.uplink == uplink
        return PatchWriter(
            encoding,
            self._method.spec,
            key.child("encoding"),
            reference,
            residual,
            measures=as_asked,
            mask_time=mask_time,
        )
