"""The control file of a run: its owner's pending requests, which survive restarts.

It is a file because a request must outlive the coordinator and the service. Write access to the run's folder
is the permission to control the run; no other access control is needed.
"""

from pathlib import Path

import msgspec
from msgspec import Struct

from fleetune.coordinator.store.run_folder import CONTROL
from fleetune.protocols.errors import StoreError
from fleetune.protocols.files import write_atomically


class Control(Struct, frozen=True, omit_defaults=True):
    """Pending requests for one run.

    Attributes:
        paused: True if no new round opens.
        stopped: True if the coordinator stops serving the run. A service does not start the run again until
            this is withdrawn.
        forget: ids of devices to remove from the run, as soon as no process serves it.
    """

    paused: bool = False
    stopped: bool = False
    forget: tuple[str, ...] = ()


def read_control(folder: Path) -> Control:
    """Return the pending requests for the run in this folder; the defaults if there is no control file.

    Raises:
        StoreError: the file is damaged or cannot be read.
    """
    path = folder / CONTROL
    try:
        return msgspec.json.decode(path.read_bytes(), type=Control)
    except FileNotFoundError:
        return Control()
    except OSError as problem:
        raise StoreError(f"cannot read {path}: {problem.strerror}") from None
    except msgspec.MsgspecError:
        raise StoreError(
            f"{path} is damaged: delete it to clear pending requests to pause, stop or forget"
        ) from None


def write_control(folder: Path, control: Control) -> None:
    """Replace the pending requests.

    Raises:
        StoreError: the file cannot be written.
    """
    write_atomically(folder / CONTROL, msgspec.json.encode(control))
