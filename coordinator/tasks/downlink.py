"""Encodes tasks as differences to the model that each device has, and predicts what the device decodes.

If many devices have the same model and get the same task, it is encoded once. A device that joins late, or
whose model is unknown, gets its whole task, lossless, over the run's first weights. Other devices get the
difference in the run's encoding. What a lossy encoding leaves out is sent with the next task, because that is
the difference to the model that the device then has.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fleetune.coordinator.tasks.device_models import DeviceModels
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.update import codec, encodings
from fleetune.protocols.update.encodings.encoding import Encoding
from fleetune.protocols.update.masks.coding_time import CodingTime
from fleetune.protocols.update.patch import patches_in
from fleetune.protocols.update.patch_values import PatchWriter
from fleetune.protocols.update.reference_model import ReferenceModel, ReferenceModelCache, num_remembered
from fleetune.protocols.update.shared_payload_cache import EncodeCache, PayloadContent
from fleetune.protocols.wire.payloads import Assignment

LOSSLESS = "lossless"
_ROUNDS_OF_FIRST = 2  # until then no device can hold anything newer than what one round has changed


@dataclass(frozen=True)
class Delivered:
    """A task as its device has it after decoding.

    Attributes:
        task: what the device reads.
        reference: what both sides hold when it has, and what the device writes its update with.
        unsent: what the plan had beyond that, shape (spec.size,); None for nothing.
        advances: the device holds `reference` from then on.
    """

    task: Any
    reference: ReferenceModel
    unsent: FlatArray | None = None
    advances: bool = False


@dataclass
class Downlink:
    """Writes the tasks of a run.

    Attributes:
        encoding: of the values of tasks.
        spec: the model.
        kind: of the method's tasks.
        key: of the run.
        held: what devices hold.
        mask_time: how long a device takes to read the code of a mask; None: that does not matter.
        in_process: the devices run in this process, and read what was written from `content`.
        content: then, what was written last; None if nothing was written.
    """

    encoding: Encoding
    spec: ModelSpec
    kind: type
    key: Key
    held: DeviceModels
    mask_time: Callable[[str], CodingTime | None] = lambda _: None
    in_process: bool = False
    content: PayloadContent | None = field(default=None, init=False)
    _written: EncodeCache = field(init=False)
    _references: ReferenceModelCache = field(default_factory=ReferenceModelCache, init=False)

    def __post_init__(self) -> None:
        self._written = EncodeCache(num_remembered(self.spec))

    def write(self, assignment: Assignment[Any]) -> bytes:
        """Return the encoded task. Raises StoreError."""
        reference, self.content = self.held.of(assignment.device), None
        if reference is None:
            return codec.encode(assignment, self.spec)
        key = self.key.child("down", assignment.round, assignment.attempt)
        encoding, mask_time = self._encoding(reference, assignment), self.mask_time(assignment.device)
        writer = PatchWriter(encoding, self.spec, key, reference, written=self._written, mask_time=mask_time)
        payload = codec.encode(replace(assignment, base=reference.digest), self.spec, writer=writer)
        if self.in_process:
            self.content = writer.content(assignment.task)
        return payload

    def forget_written(self) -> None:
        """Drop cached encoded values; they are encoded again if another device needs them."""
        self._written.forget()

    def delivered(self, planned: Assignment[Any]) -> Delivered:
        """Return what a device has after it decoded a planned task. Raises StoreError."""
        reference = self.held.of(planned.device)
        if reference is None:
            return Delivered(planned.task, ReferenceModel.of_task(planned.task, self.spec))
        if self._encoding(reference, planned).lossless:
            after = self._references.known(reference.after(planned.task, self.spec))
            return Delivered(planned.task, after, advances=True)
        kind = Assignment[self.kind]  # type: ignore[name-defined]
        read: Assignment[Any] = codec.decode(self.write(planned), kind, self.spec, reference=reference)
        after, whole = reference.after(read.task, self.spec), reference.after(planned.task, self.spec)
        return Delivered(read.task, after, whole.values - after.values, advances=True)

    def _encoding(self, reference: ReferenceModel, assignment: Assignment[Any]) -> Encoding:
        """Return the encoding of a task: lossless over old first weights, where a lossy one would lose too
        much.
        """
        old = reference is self.held.first and assignment.round > _ROUNDS_OF_FIRST
        return encodings.find(LOSSLESS) if old else self.encoding


def add_unsent(update: Any, unsent: FlatArray, spec: ModelSpec) -> None:
    """Move an update's values, in place, as if its device had started from all values planned for it."""
    for patch in patches_in(update):
        values = patch.values + unsent[patch.selection.mask(spec)]
        object.__setattr__(patch, "values", values.astype(np.float32))  # it has just been read
