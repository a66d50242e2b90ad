"""What tests of comparisons and of sweeps share."""

import pytest

import fleetune.tools.compare.compare
import fleetune.tools.compare.side_by_side
from fleetune.tools.compare.cells import play_all


@pytest.fixture
def played(monkeypatch):
    """The titles of the runs that are played from here on, in order; nothing is drawn."""
    titles = []

    def watched(cells, **options):
        titles.extend(cell.title for cell in cells)
        play_all(cells, **options)

    monkeypatch.setattr(fleetune.tools.compare.side_by_side, "play_all", watched)
    monkeypatch.setattr(fleetune.tools.compare.compare, "can_paint", lambda: False)
    return titles
