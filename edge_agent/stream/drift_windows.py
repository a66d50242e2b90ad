"""The inputs of the drift test: projections of the newest inputs, stored next to the samples.

Projections stay when their samples are evicted, so that retention does not distort the test.
"""

import sqlite3

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.stream import store_values
from fleetune.edge_agent.stream.drift import (
    DIRECTIONS,
    PATIENCE,
    REFERENCE,
    WINDOW,
    input_drift,
    loss_drift,
    project,
)
from fleetune.edge_agent.stream.store_values import DriftState

_KNOWN, _NEXT = "reference", "reference of the round"
_LOSSES, _WAITED = "losses", "trainings that left losses higher"


def add_input(connection: sqlite3.Connection, form: int, x: NDArray[np.generic]) -> None:
    """Store the projections of a new input."""
    row = form, project(x).astype("<f4").tobytes()
    connection.execute("INSERT INTO arrival (form, projections) VALUES (?, ?)", row)


def test_full_windows(connection: sqlite3.Connection) -> None:
    """Test each full window for input drift, then delete the projections that no later test needs."""
    latest = _latest(connection)
    drift = store_values.get(connection, DriftState) or DriftState()
    reference, tested = store_values.get_bytes(connection, _KNOWN), drift.tested
    while latest - drift.tested >= WINDOW:
        window = _read(connection, drift.tested, drift.tested + WINDOW)
        if reference is not None and window is not None:
            drift.inputs = input_drift(_matrix(reference), window)
        drift.tested += WINDOW
    if drift.tested != tested:
        store_values.put(connection, drift)
    least = min(drift.tested, latest - REFERENCE)
    connection.execute("DELETE FROM arrival WHERE number <= ?", (least,))


def save_next_reference(connection: sqlite3.Connection) -> None:
    """Save the newest inputs; they become the reference once the open round has trained on them."""
    latest = _latest(connection)
    found = _read(connection, latest - REFERENCE, latest)
    store_values.put_bytes(connection, _NEXT, b"" if found is None else found.tobytes())


def use_next_reference(connection: sqlite3.Connection, change: int) -> None:
    """Make the inputs that `save_next_reference` saved the reference of later tests.

    Args:
        connection: the store's connection.
        change: number of the store's change up to which the round trained.
    """
    found = store_values.get_bytes(connection, _NEXT)
    if found is not None:
        store_values.put_bytes(connection, _KNOWN, found)
        store_values.put(connection, DriftState(_latest(connection), loss_tested=change))


def reference_losses(connection: sqlite3.Connection) -> NDArray[np.float32]:
    """Return the reference of loss drift: losses on held-out samples of an earlier training, shape (n,)."""
    return np.frombuffer(store_values.get_bytes(connection, _LOSSES) or b"", "<f4")


def save_reference_losses(connection: sqlite3.Connection, losses: NDArray[np.float32]) -> None:
    """Save the deployed model's losses on held-out samples as the reference of loss drift.

    Losses that are much higher than the reference are not saved, for at most `PATIENCE` trainings.

    Args:
        connection: the store's connection.
        losses: losses after the round, shape (n,).
    """
    waited = store_values.get_number(connection, _WAITED)
    worse = len(losses) and (loss_drift(reference_losses(connection), losses) or 0.0) >= 1
    if worse and waited < PATIENCE:
        store_values.put_number(connection, _WAITED, waited + 1)
        return
    store_values.put_number(connection, _WAITED, 0)
    store_values.put_bytes(connection, _LOSSES, losses.tobytes())


def clear(connection: sqlite3.Connection) -> None:
    """Delete all data derived from inputs, because projections are not linked to their samples."""
    connection.execute("DELETE FROM arrival")
    for name in (_KNOWN, _NEXT, _LOSSES):
        store_values.drop_bytes(connection, name)


def _latest(connection: sqlite3.Connection) -> int:
    row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'arrival'").fetchone()
    return 0 if row is None else int(row[0])


def _read(connection: sqlite3.Connection, after: int, until: int) -> NDArray[np.float32] | None:
    """Return projections of the arrivals after `after` up to `until`, shape (n, DIRECTIONS); None without
    any.

    Only those with the newest arrival's form (dtype and shape) are read.
    """
    query = "SELECT form, projections FROM arrival WHERE number > ? AND number <= ? ORDER BY number"
    rows = connection.execute(query, (after, until)).fetchall()
    if not rows:
        return None
    return _matrix(b"".join(data for form, data in rows if form == rows[-1][0]))


def _matrix(data: bytes) -> NDArray[np.float32]:
    return np.frombuffer(data, "<f4").reshape(-1, DIRECTIONS).astype(np.float32)
