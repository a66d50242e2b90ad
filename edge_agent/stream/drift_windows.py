"""The newest inputs as the test of drift sees them: kept beside the samples, whatever becomes of those."""

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
    """A new input is here."""
    row = form, project(x).astype("<f4").tobytes()
    connection.execute("INSERT INTO arrival (form, projections) VALUES (?, ?)", row)


def test_full_windows(connection: sqlite3.Connection) -> None:
    """Test each window that is full, and forget arrivals that no test needs."""
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
    """The newest inputs are those that the round under way will have been trained with."""
    latest = _latest(connection)
    found = _read(connection, latest - REFERENCE, latest)
    store_values.put_bytes(connection, _NEXT, b"" if found is None else found.tobytes())


def use_next_reference(connection: sqlite3.Connection, change: int) -> None:
    """The round on the samples after this change is done: from now on inputs are tested against those that it
    noted.
    """
    found = store_values.get_bytes(connection, _NEXT)
    if found is not None:
        store_values.put_bytes(connection, _KNOWN, found)
        store_values.put(connection, DriftState(_latest(connection), loss_tested=change))


def reference_losses(connection: sqlite3.Connection) -> NDArray[np.float32]:
    """Losses of before, on held-out samples, shape (n,)."""
    return np.frombuffer(store_values.get_bytes(connection, _LOSSES) or b"", "<f4")


def save_reference_losses(connection: sqlite3.Connection, losses: NDArray[np.float32]) -> None:
    """A round is done, and the served model has these on held-out samples, shape (n,)."""
    waited = store_values.get_number(connection, _WAITED)
    worse = len(losses) and (loss_drift(reference_losses(connection), losses) or 0.0) >= 1
    if worse and waited < PATIENCE:
        store_values.put_number(connection, _WAITED, waited + 1)
        return
    store_values.put_number(connection, _WAITED, 0)
    store_values.put_bytes(connection, _LOSSES, losses.tobytes())


def clear(connection: sqlite3.Connection) -> None:
    """Delete all that was made of inputs: samples were removed, and projections do not say whose they are."""
    connection.execute("DELETE FROM arrival")
    for name in (_KNOWN, _NEXT, _LOSSES):
        store_values.drop_bytes(connection, name)


def _latest(connection: sqlite3.Connection) -> int:
    row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'arrival'").fetchone()
    return 0 if row is None else int(row[0])


def _read(connection: sqlite3.Connection, after: int, until: int) -> NDArray[np.float32] | None:
    """Those of the form that came last, shape (n, DIRECTIONS); None: there are none."""
    query = "SELECT form, projections FROM arrival WHERE number > ? AND number <= ? ORDER BY number"
    rows = connection.execute(query, (after, until)).fetchall()
    if not rows:
        return None
    return _matrix(b"".join(data for form, data in rows if form == rows[-1][0]))


def _matrix(data: bytes) -> NDArray[np.float32]:
    return np.frombuffer(data, "<f4").reshape(-1, DIRECTIONS).astype(np.float32)
