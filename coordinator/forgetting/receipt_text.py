"""A receipt as lines of text."""

import time
from collections.abc import Iterator
from pathlib import Path

from fleetune.coordinator.forgetting.receipt import REGISTRY, Receipt
from fleetune.protocols.files import write_atomically

_WORDS = {
    "member": "state in the rounds",
    "traffic": "counts of its traffic",
    "reply": "update of the open round",
    "task": "task of the open round",
    "device_round": "results of rounds",
    "round": "its name in lists of participants",
    "method": "state of the method",
    "rejection": "counts of rejected messages",
    "held": "model that it holds",
    "device": "entry with certificates, name and tags",
    "incomplete_payload": "incomplete payloads",
    "log_line": "lines of logs",
    "report_file": "files of the run's report, written anew",
}


def write_receipt_text(path: Path, receipt: Receipt) -> None:
    """Write a receipt for people next to its JSON file. Raises StoreError."""
    lines = "".join(f"{line}\n" for line in receipt_lines(receipt))
    write_atomically(path.with_suffix(".txt"), lines.encode())


def receipt_lines(receipt: Receipt) -> Iterator[str]:
    """Yield the lines of a receipt."""
    who = receipt.device if receipt.name == receipt.device else f"{receipt.name} ({receipt.device})"
    at = receipt.finished_at
    when = "not finished" if at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
    yield f"{who} of fleet {receipt.fleet} is forgotten: {when}"
    for part, found in receipt.removed.items():
        things = ", ".join(f"{_WORDS.get(kind, kind)} ({number})" for kind, number in found.items())
        where = "registry" if part == REGISTRY else f"run {part}"
        yield f"  removed from {where}: {things or 'nothing was stored'}"
    for one in receipt.remains:
        yield f"  remains: {one.what} ({one.why})"
