"""Since when a run's coordinator has no broker, for `edge-coordinator status`, which is another process."""

import time

import msgspec
from msgspec import Struct

from fleetune.coordinator.store.run_store import RunStore

OUTAGE = "broker_outage"
_DAY_S = 86_400


class Outage(Struct, frozen=True):
    """The broker of a run is not reached.

    Attributes:
        since: seconds of the epoch.
        reason: of the last attempt to connect.
    """

    since: float
    reason: str

    def words(self, now: float) -> str:
        """One line; the date is in it when that was a day ago or more."""
        form = "%H:%M:%S" if now - self.since < _DAY_S else "%Y-%m-%d %H:%M:%S"
        return f"broker down since {time.strftime(form, time.localtime(self.since))}: {self.reason}"


def read_outage(store: RunStore) -> Outage | None:
    """The outage that goes on, as the coordinator noted it last; None: it is connected."""
    data = store.get(OUTAGE)
    return None if data is None else msgspec.json.decode(data, type=Outage)


def write_outage(store: RunStore, outage: Outage | None) -> None:
    """Note an outage, or (None) that the broker is back."""
    with store.step():
        if outage is None:
            store.drop(OUTAGE)
        else:
            store.put(OUTAGE, msgspec.json.encode(outage))
