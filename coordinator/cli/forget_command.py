"""edge-coordinator forget: remove everything that is stored about a device."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from fleetune.coordinator.cli.options import RunsFolder
from fleetune.protocols.one_line import one_line_errors


def forget(
    device: Annotated[str, typer.Argument(help="the device's id, or its name in the fleet")],
    fleet: Annotated[
        str | None, typer.Option(help="name of the fleet; needed if several know the device")
    ] = None,
    runs: RunsFolder = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="print the receipt as JSON")] = False,
) -> None:
    """Revoke a device, remove everything stored about it, and write a receipt for its owner.

    It also works while a coordinator serves the fleet. The same command completes an interrupted removal.
    """
    import msgspec

    from fleetune.coordinator.forgetting.forget import forget as forget_device
    from fleetune.coordinator.forgetting.receipt_text import receipt_lines

    with one_line_errors("edge-coordinator"):
        receipt, path = forget_device(device, runs, fleet, lambda line: print(line, file=sys.stderr))
        if as_json:
            print(msgspec.json.encode(receipt).decode())
            return
        for line in (*receipt_lines(receipt), f"receipt: {path.with_suffix('.txt')}, and as JSON {path}"):
            print(line)
