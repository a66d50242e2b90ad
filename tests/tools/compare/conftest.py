"""What tests of comparisons and of sweeps share."""

import pytest

import fleetune.tools.compare.engine
import fleetune.tools.compare.report
from fleetune.tools.compare.runs import execute_all


@pytest.fixture
def played(monkeypatch):
    """The titles of the runs that are played from here on, in order; nothing is drawn."""
    titles = []

    def watched(cells, **options):
        titles.extend(cell.title for cell in cells)
        execute_all(cells, **options)

    monkeypatch.setattr(fleetune.tools.compare.engine, "execute_all", watched)
    monkeypatch.setattr(fleetune.tools.compare.report, "can_paint", lambda: False)
    return titles
