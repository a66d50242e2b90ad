"""Writes replies: the values of an update by the encoding of the task, with what earlier ones left out."""

from dataclasses import dataclass
from typing import Any

from msgspec import UNSET

from fleetune.edge_agent.run.local_round import RoundResult
from fleetune.protocols.method.method import Method
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.update import codec
from fleetune.protocols.update.base import Base
from fleetune.protocols.update.encodings import RAW
from fleetune.protocols.update.masks.coding_time import CodingTime
from fleetune.protocols.update.once import Told
from fleetune.protocols.update.patch_values import PatchWriter
from fleetune.protocols.wire.payloads import Assignment, Enrolment, Measures, Reply, work_key


@dataclass(frozen=True)
class WrittenReply:
    """An encoded reply.

    Attributes:
        data: its bytes.
        residual: what its encoding left out, shape (spec.size,); None: nothing is kept of that.
        left_out: share of the change that the encoding which the task asks for left out; None: not known.
        sent: what the reply says, for readers in this process; None: they find out.
    """

    data: bytes
    residual: FlatArray | None = None
    left_out: float | None = None
    sent: Told | None = None


class UpdateWriter:
    """Writes the replies of one device in one run.

    Args:
        enrolment: of the run.
        device: its name.
        method: made from the enrolment.
        tells: whether readers in this process are given what a reply says.
    """

    def __init__(
        self, enrolment: Enrolment, device: str, method: Method[Any, Any, Any, Any], *, tells: bool
    ) -> None:
        self._enrolment, self._device, self._method, self._tells = enrolment, device, method, tells

    def write(
        self,
        assignment: Assignment[Any],
        result: RoundResult,
        base: Base,
        uplink: int,
        residual: FlatArray | None,
        mask_time: CodingTime | None,
    ) -> WrittenReply:
        """The reply to a round's task.

        Args:
            assignment: the task.
            result: of its work.
            base: the model that both sides hold.
            uplink: the encoding, by its place in `Enrolment.uplinks`.
            residual: what earlier updates left out, shape (spec.size,); None: nothing.
            mask_time: how long the device takes to code a mask; None: it does not matter.
        """
        writer = self._patch_writer(assignment, base, uplink, residual, mask_time)
        reply = Reply(
            device=self._device,
            round=assignment.round,
            attempt=assignment.attempt,
            leaving=self._method.finished(result.state),
            measures=result.measures,
            update=result.update,
            base=UNSET if writer is None else writer.base_digest,
        )
        data = codec.encode(reply, self._method.spec, writer=writer, compact=self._compact)
        if writer is None:
            return WrittenReply(data)
        sent = writer.told(result.update) if self._tells else None
        return WrittenReply(data, writer.left_out, writer.left_over, sent)

    def write_measures(self, assignment: Assignment[Any], measures: Measures) -> bytes:
        """The reply to a final evaluation: no update goes along."""
        reply: Reply[Any] = Reply(self._device, assignment.round, assignment.attempt, False, measures, None)
        return codec.encode(reply, self._method.spec, compact=self._compact)

    @property
    def _compact(self) -> bool:
        return self._enrolment.compact is True

    def _patch_writer(
        self,
        assignment: Assignment[Any],
        base: Base,
        uplink: int,
        residual: FlatArray | None,
        mask_time: CodingTime | None,
    ) -> PatchWriter | None:
        """Writes the update's values; None: they are written unchanged."""
        encoding = self._enrolment.uplinks[uplink]
        if encoding.name == RAW and residual is None:
            return None
        key = work_key(self._enrolment.seed, assignment.round, assignment.attempt, self._device)
        as_asked = assignment.uplink == uplink  # a device that sends less reports no compression error
        return PatchWriter(
            encoding,
            self._method.spec,
            key.child("encoding"),
            base,
            residual,
            measures=as_asked,
            mask_time=mask_time,
        )
