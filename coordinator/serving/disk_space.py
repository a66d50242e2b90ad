"""Room on the coordinator's disk for what arrives: announced before it is taken, given back when it is left.

A payload needs its part and its row in the run's store. Parts that an earlier process left are of use only to
devices that come back soon.
"""

import shutil
import time
from pathlib import Path

from fleetune.coordinator.serving.device_sessions import DeviceSessions
from fleetune.coordinator.serving.payload_buffer import SMALL_BYTES
from fleetune.coordinator.store.run_folder import INCOMING
from fleetune.protocols import files
from fleetune.protocols.wire.messages import Offer

RESERVE_BYTES = 256 * 2**20
KEEP_PARTS_S = 86_400.0
_LEAST_SHARE = 50  # of a small disk only this part is kept free


def no_space_reason(offer: Offer, sessions: DeviceSessions, folder: Path) -> str | None:
    """Why an offered payload cannot be taken; None if it can.

    Parts that nobody goes on with make room first.

    Args:
        offer: of a payload that is wanted, and of which nothing was taken yet.
        sessions: the sessions of all devices; space for their open transfers is reserved.
        folder: of the run.
    """
    wanted_bytes = 2 * (offer.num_bytes + sessions.incoming_bytes)
    if offer.num_bytes <= SMALL_BYTES or _fits(wanted_bytes, folder):
        return None
    remove_old_parts(folder, but={name for one in sessions.busy() for name in one.link.inbox.transfers})
    if _fits(wanted_bytes, folder):
        return None
    return (
        f"the coordinator has no room for {offer.num_bytes} bytes: {sessions.incoming_bytes} bytes of other"
        " payloads are on their way"
    )


def remove_old_parts(folder: Path, *, but: set[str], older_than_s: float = 0.0) -> None:
    """Remove parts of payloads, but for these transfers and those written in the last `older_than_s`."""
    for path in (folder / INCOMING).glob("*/*.part"):
        if path.stem not in but and time.time() - path.stat().st_mtime >= older_than_s:
            files.remove(path, durable=False)


def _fits(num_bytes: int, folder: Path) -> bool:
    disk = shutil.disk_usage(folder)
    return disk.free - num_bytes >= min(RESERVE_BYTES, disk.total // _LEAST_SHARE)
