"""A receipt as lines of text."""

import time
from collections.abc import Iterator

from fleetune.coordinator.forgetting.receipt import REGISTRY, Receipt

_WORDS = {
    "member": "state in the rounds",
    "traffic": "counts of its traffic",
    "reply": "update of the open round",
    "task": "task",
    "device_round": "results of rounds",
    "round": "names in lists of participants",
    "method": "state of the method",
    "rejection": "counts of rejected messages",
    "held": "model that it holds",
    "device": "entry",
    "incomplete_payload": "incomplete payloads",
    "log_line": "lines of logs",
    "report_file": "files of its report, written anew",
}


def receipt_lines(receipt: Receipt) -> Iterator[str]:
    """Yield the lines of a receipt."""
    who = receipt.device if receipt.name == receipt.device else f"{receipt.name} ({receipt.device})"
    at = receipt.finished_at
    when = "not finished" if at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
    yield f"{who} of fleet {receipt.fleet} is forgotten: {when}"
    for part, found in receipt.removed.items():
        things = ", ".join(f"{number} {_WORDS.get(kind, kind)}" for kind, number in found.items())
        where = "registry" if part == REGISTRY else f"run {part}"
        yield f"  removed from {where}: {things or 'nothing was stored'}"
    for one in receipt.remains:
        yield f"  remains: {one.what} ({one.why})"
