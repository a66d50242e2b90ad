"""Stores since when a coordinator cannot reach its broker, for `edge-coordinator status`."""

import time

import msgspec
from msgspec import Struct

from fleetune.coordinator.store.run_store import RunStore

OUTAGE = "broker_outage"
_DAY_S = 86_400


class Outage(Struct, frozen=True):
    """An outage of the run's broker.

    Attributes:
        since: seconds since 1970.
        reason: why the last attempt to connect failed.
    """

    since: float
    reason: str

    def words(self, now: float) -> str:
        """Return one line of text, with the date if the outage began a day ago or earlier."""
        form = "%H:%M:%S" if now - self.since < _DAY_S else "%Y-%m-%d %H:%M:%S"
        return f"broker down since {time.strftime(form, time.localtime(self.since))}: {self.reason}"


def read_outage(store: RunStore) -> Outage | None:
    """Return the present outage, as the coordinator stored it last; None if it is connected."""
    data = store.get(OUTAGE)
    return None if data is None else msgspec.json.decode(data, type=Outage)


def write_outage(store: RunStore, outage: Outage | None) -> None:
    """Store an outage, or None when the broker can be reached again."""
    with store.step():
        if outage is None:
            store.drop(OUTAGE)
        else:
            store.put(OUTAGE, msgspec.json.encode(outage))
