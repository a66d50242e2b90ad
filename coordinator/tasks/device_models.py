"""The model that each device has, as far as the coordinator knows: the reference of the device's next task.

It is the run's initial weights, updated by the device's tasks. A device that answers has the model of its
task.
A device that received its task and did not answer probably has it too, so the model before it is also stored.
When a device connects, it reports the digest of its model. If the digest matches none of these, its next task
is written over the initial weights, which every device has.

Each model is stored once, however many devices have it.
"""

from collections import Counter, OrderedDict

import msgspec
import numpy as np
from msgspec import Struct

from fleetune.coordinator.store.method_state import stored_pieces
from fleetune.coordinator.store.run_store import RunStore
from fleetune.protocols.errors import StoreError
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.update import codec
from fleetune.protocols.update.reference_model import ReferenceModel, num_remembered


class Standing(Struct, frozen=True, omit_defaults=True):
    """Digests of the model that a device has, and of the one that it has if it did not take its last task."""

    held: str
    before: str = ""


class DeviceModels:
    """Stores the devices' models. Call all methods that change anything inside `store.step()`.

    Args:
        store: of the run.
        spec: its model.
        weights: its first, shape (spec.size,).
    """

    def __init__(self, store: RunStore, spec: ModelSpec, weights: FlatArray) -> None:
        self._store, self._spec = store, spec
        self.first = ReferenceModel.whole(weights)
        self._standings: dict[DeviceId, Standing] = {}
        self._holders: Counter[str] = Counter()
        self._read: OrderedDict[str, ReferenceModel] = OrderedDict()
        self._most_read = num_remembered(spec)

    def recall(self) -> None:
        """Load the stored state."""
        rows = self._store.rows("held")
        self._standings = {name: msgspec.json.decode(data, type=Standing) for name, data in rows}
        self._holders = Counter(one for found in self._standings.values() for one in _digests(found))

    def of(self, device: DeviceId) -> ReferenceModel | None:
        """Return the reference of the device's next task; None if it cannot use differences. Raises
        StoreError.
        """
        standing = self._standings.get(device)
        return None if standing is None else self._model(standing.held)

    def is_known(self, device: DeviceId, digest: str) -> bool:
        """True if the device may have the model of the reported digest, which is then recorded for it."""
        standing = self._standings.get(device)
        if digest == self.first.digest or (standing is not None and digest in _digests(standing)):
            self._stand(device, Standing(digest))
            return True
        return False

    def begin_anew(self, device: DeviceId) -> None:
        """Use the initial weights as reference of the next task, because the device's model is unknown."""
        self._stand(device, Standing(self.first.digest))

    def forget(self, device: DeviceId) -> None:
        """Remove a device that cannot use differences."""
        self._release(self._standings.pop(device, None))
        self._store.drop_row("held", device)

    def advance(self, device: DeviceId, reference: ReferenceModel, *, unsure: bool = False) -> None:
        """Record the device's model from now on.

        `unsure`: it has this model only if it took its last task.
        """
        before = self._standings[device].held if unsure and device in self._standings else ""
        self._add(reference)
        self._stand(device, Standing(reference.digest, before if before != reference.digest else ""))

    def _stand(self, device: DeviceId, standing: Standing) -> None:
        old = self._standings.get(device)
        if old == standing:
            return
        self._standings[device] = standing
        self._holders.update(_digests(standing))
        self._store.put_rows("held", [(device, msgspec.json.encode(standing))])
        self._release(old)

    def _release(self, standing: Standing | None) -> None:
        for digest in () if standing is None else _digests(standing):
            self._holders[digest] -= 1
            if not self._holders[digest]:
                del self._holders[digest]
                self._read.pop(digest, None)
                self._store.drop_held_model(digest)

    def _add(self, reference: ReferenceModel) -> None:
        if reference.digest not in self._holders and reference.digest != self.first.digest:
            self._store.add_held_model(reference.digest, stored_pieces(reference.values, self._spec))
        self._remember(reference)

    def _model(self, digest: str) -> ReferenceModel:
        if digest == self.first.digest:
            return self.first
        if digest not in self._read:
            data = self._store.held_model(digest)
            values: FlatArray = codec.decode(data, np.ndarray, self._spec, finite=False)
            reference = ReferenceModel.whole(values)
            if reference.digest != digest:
                raise StoreError(f"{self._store.path} is damaged: a model that devices hold is another one")
            self._remember(reference)
        self._read.move_to_end(digest)
        return self._read[digest]

    def _remember(self, reference: ReferenceModel) -> None:
        self._read[reference.digest] = reference
        while len(self._read) > self._most_read:
            self._read.popitem(last=False)


def _digests(standing: Standing) -> list[str]:
    return [one for one in (standing.held, standing.before) if one]
