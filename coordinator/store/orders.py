"""What its owner ordered of a run: a file in its folder, for whoever is at the run, also after a restart.

A file, because an order must outlive the coordinator and the service, and because who may write to the folder
may order: there is nobody else to let in or keep out.
"""

from pathlib import Path

import msgspec
from msgspec import Struct

from fleetune.protocols.errors import StoreError
from fleetune.protocols.files import write_atomically

ORDERS = "orders.json"


class Orders(Struct, frozen=True, omit_defaults=True):
    """Of one run.

    Attributes:
        paused: no new round opens.
        stopped: the run is left, and not taken up again until this is withdrawn.
    """

    paused: bool = False
    stopped: bool = False


def read_orders(folder: Path) -> Orders:
    """The orders that stand for the run in this folder; none where there is no file.

    Raises:
        StoreError: the file is damaged or cannot be read.
    """
    path = folder / ORDERS
    try:
        return msgspec.json.decode(path.read_bytes(), type=Orders)
    except FileNotFoundError:
        return Orders()
    except OSError as problem:
        raise StoreError(f"cannot read {path}: {problem.strerror}") from None
    except msgspec.MsgspecError:
        raise StoreError(f"{path} is damaged: remove it, then no order stands") from None


def write_orders(folder: Path, orders: Orders) -> None:
    """Give these orders instead of those that stand.

    Raises:
        StoreError: they cannot be written.
    """
    write_atomically(folder / ORDERS, msgspec.json.encode(orders))
