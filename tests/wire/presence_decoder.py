"""What an agent reads, by a decoder in plain Python that shares nothing with the product (docs/wire.md)."""

import json
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "wire.md"
KINDS = ("encodings", "masks", "messages", "operators", "updates")


def sets():
    """The numbered sets of features, as the tables of docs/wire.md give them."""
    row = rf"^\| (\d+) \| `({'|'.join(KINDS)})` \| (.*) \|$"
    rows = re.findall(row, PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    found = [{kind: [] for kind in KINDS}]
    for number, kind, names in rows:
        while len(found) <= int(number):
            found.append({one: list(found[-1][one]) for one in KINDS})
        found[int(number)][kind] += re.findall(r"`([\w-]+)`", names)
    return found


def features(presence: bytes):
    """The features that an agent reads, by kind, from its presence."""
    reads, known = json.loads(presence).get("reads", {}), sets()
    base = known[min(reads.get("set", 0), len(known) - 1)]
    lacks, also = reads.get("lacks", {}), reads.get("also", {})
    return {
        kind: " ".join(sorted({*base[kind]} - {*lacks.get(kind, [])} | {*also.get(kind, [])}))
        for kind in KINDS
    }
