"""The control file of a run: the requests of its owner that stand, also after a restart.

It is a file because a request must outlive the coordinator and the service. Whoever may write to the run's
folder may control the run, so that no other access control is needed.
"""

from pathlib import Path

import msgspec
from msgspec import Struct

from fleetune.coordinator.store.run_folder import CONTROL
from fleetune.protocols.errors import StoreError
from fleetune.protocols.files import write_atomically


class Control(Struct, frozen=True, omit_defaults=True):
    """The requests that stand for one run.

    Attributes:
        paused: no new round opens.
        stopped: the coordinator leaves the run, and a service does not start it again until this is
            withdrawn.
    """

    paused: bool = False
    stopped: bool = False


def read_control(folder: Path) -> Control:
    """The requests that stand for the run in this folder; none where there is no file.

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
        raise StoreError(f"{path} is damaged: delete it to clear pending pause and stop requests") from None


def write_control(folder: Path, control: Control) -> None:
    """Replace the requests that stand. Raises StoreError: they cannot be written."""
    write_atomically(folder / CONTROL, msgspec.json.encode(control))
