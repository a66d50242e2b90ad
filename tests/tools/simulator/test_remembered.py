"""What a simulation remembers of the last tasks and reads before it is due changes no figure."""

import pytest
from tests.helpers.nightly import sooner
from tests.tools.simulator.test_stopped import CASES, figures, wanted

from fleetune.protocols.update.base import KnownBases
from fleetune.protocols.update.once import ReadBefore, Written
from fleetune.tools.simulator import work_at_hand
from fleetune.tools.simulator.runner import simulate

KEPT = ("late devices", "proposals", "lossy both ways", "semi-asynchronous, differences", "kapc-bls")


def played(case, folder):
    run, summary = simulate(wanted(case, rounds=4), folder, workers=0, fresh=True)
    found = figures(run, summary)
    run.store.close()
    return found


@pytest.mark.parametrize("name", sooner(CASES, KEPT))
def test_it_ends_as_one_that_remembers_nothing(name, tmp_path, monkeypatch):
    case = CASES[name]
    remembering = played(case, tmp_path / "a")
    monkeypatch.setattr(work_at_hand, "_MOST_BYTES_AHEAD", 0)
    monkeypatch.setattr(KnownBases, "known", lambda _, base: base)
    monkeypatch.setattr(ReadBefore, "found", lambda _, about, data, mask, read: read())
    monkeypatch.setattr(Written, "found", lambda _, around, mask, values, write: write())
    assert played(case, tmp_path / "b") == remembering
