"""Checks a data stream: its folder and its sample store."""

from collections.abc import Iterator
from pathlib import Path

from fleetune.edge_agent.doctor.check_result import CheckResult
from fleetune.edge_agent.stream.sample_store import SampleStore
from fleetune.edge_agent.stream.sample_stream import check_stream, without_password
from fleetune.edge_agent.stream.status import status


def data(source: str, path: Path | None, test_fraction: float) -> Iterator[CheckResult]:
    """Check a stream.

    Args:
        source: value of `--data`.
        path: folder of the sample store. None: the fleet is unknown.
        test_fraction: share of the samples that is held out for testing.

    Raises:
        DataError: its folder is missing.
        StoreError: the store is damaged or has another format.
    """
    check_stream(source)
    source = without_password(source)
    if path is None or not path.exists():
        yield CheckResult("ok", "data", f"{source}: samples are stored as they arrive; none yet")
        return
    store = SampleStore.open(path)
    try:
        found = status(store, test_fraction)
    finally:
        store.close()
    train, test = (sum(getattr(row, part) for row in found.classes) for part in ("train", "test"))
    text = f"{source}: {train} training and {test} test samples stored, {found.num_bytes / 1e6:.1f} MB"
    if found.refused:
        counts = ", ".join(f"{count} {kind}" for kind, (count, _) in found.refused.items())
        yield CheckResult(
            "warn", "data", f"{text}; rejected: {counts}", "edge-agent samples shows which and why"
        )
        return
    yield CheckResult("ok", "data", text)
