"""Checks that the disk has space for an incoming payload before its offer is accepted.

A payload needs its size twice: in its part file, and in its row of the run's store. Part files of an
earlier process are useful only if their devices reconnect soon.
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
_LEAST_SHARE = 50  # of a small disk, one part in this many is kept free instead of RESERVE_BYTES


def no_space_reason(offer: Offer, sessions: DeviceSessions, folder: Path) -> str | None:
    """Return why the disk has no space for an offered payload; None if it has.

    Part files that no open transfer uses are removed first if space is short.

    Args:
        offer: the offer of a wanted payload that has not begun to arrive.
        sessions: the sessions of all devices; space is reserved for their open transfers.
        folder: the folder of the run.
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
    """Remove part files, except those in `but` and those written in the last `older_than_s` seconds."""
    for path in (folder / INCOMING).glob("*/*.part"):
        if path.stem not in but and time.time() - path.stat().st_mtime >= older_than_s:
            files.remove(path, durable=False)


def _fits(num_bytes: int, folder: Path) -> bool:
    disk = shutil.disk_usage(folder)
    return disk.free - num_bytes >= min(RESERVE_BYTES, disk.total // _LEAST_SHARE)
