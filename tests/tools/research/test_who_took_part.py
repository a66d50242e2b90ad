"""Headline scores are over the devices that took part; a reading over all devices stands beside them."""

from statistics import fmean

import pytest
from rich.console import Console

import fleetune
from fleetune.coordinator.reports.tables import run_table
from fleetune.tools.compare.tables import comparison_tables
from fleetune.tools.papers.measures import MEASURES

RUN = {
    "run": {"name": "few", "rounds": 1},
    "data": {"source": "digits"},
    "model": {"name": "mlp"},
    "method": {"name": "fedavg"},
    "training": {"epochs": 3},
    "fleet": {"devices": 5},
    "round": {"participants": 2},
}


def shown(table):
    console = Console(width=200, record=True, quiet=True)
    with console.capture() as capture:
        console.quiet = False
        console.print(table)
    return capture.get()


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    return fleetune.compare(RUN, ["fedavg", "local-only"], runs=tmp_path_factory.mktemp("runs"))


@pytest.fixture
def few(compared):
    return fleetune.read_result(compared.folder / "fedavg" / "seed-0")


def test_the_headline_is_over_those_that_took_part(few):
    rows = few.summary.by_device.values()
    trained = [row.personal for row in rows if row.updates]
    assert len(trained) == 2
    accuracy = few.summary.accuracy
    assert accuracy.personal_mean == pytest.approx(fmean(trained))
    assert accuracy.personal_mean_all == pytest.approx(fmean(row.personal for row in rows))
    assert accuracy.personal_mean > accuracy.personal_mean_all
    assert few.summary.ranked == sorted(trained)
    assert "(2 of 5 devices took part)" in repr(few)


def test_tables_and_page_say_it_and_agree(few, compared):
    mean = f"{100 * few.summary.accuracy.personal_mean:.1f} %"
    over_all = f"{100 * few.summary.accuracy.personal_mean_all:.1f} %"
    said = shown(run_table(few.summary))
    assert "personal models: 2 of 5 devices took part" in said
    assert mean in said
    assert over_all in said
    page = (compared.folder / "report.html").read_text()
    for text in (shown(comparison_tables(compared.comparison)), page):
        assert mean.removesuffix(" %") in text
        assert over_all.removesuffix(" %") in text
    row = compared.frame.set_index("method").loc["fedavg"]
    assert row["accuracy_personal_mean"] == few.summary.accuracy.personal_mean
    assert row["accuracy_personal_mean_all"] == few.summary.accuracy.personal_mean_all
    assert row["accuracy_personal_worst"] == few.summary.ranked[0]
    assert set(compared.gains()["device"]) == {
        name for name, one in few.summary.by_device.items() if one.updates
    }


def test_cells_of_papers_are_over_all_devices_as_before(compared):
    run = next(run for run in compared.comparison.runs if run.label == "fedavg")
    assert MEASURES["final-mean"].of(run) == run.summary.accuracy.personal_mean_all
    assert MEASURES["final-weighted"].of(run) == run.summary.accuracy.personal_weighted_all


def test_where_all_take_part_nothing_else_is_said(tmp_path):
    whole = fleetune.simulate(RUN, tmp_path, set={"round.participants": 5}, report=False)
    assert '"personal_mean_all"' not in (whole.folder / "summary.json").read_text()
    assert "took part" not in shown(run_table(whole.summary)) + repr(whole)
