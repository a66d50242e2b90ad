"""What a method tells of its inner workings, in every view: of a made-up one, by its declarations alone."""

import csv
import io
import json

import msgspec
import pytest
from msgspec.structs import replace
from tests.conftest import tiny_spec
from tests.coordinator.reports.test_live import shown as screen
from tests.coordinator.reports.test_live import snapshot
from tests.coordinator.reports.test_report import Outline, records_of, settings_of
from tests.coordinator.reports.test_report import summary_of as plain_summary
from tests.helpers.telling_methods import DIAGNOSTICS, KEPT, PEAK, SENT, SPREAD

from fleetune.coordinator.metrics.diagnostics import (
    MAX_POINTS,
    as_sentence,
    diagnostics_line,
    histories,
    metric_of,
)
from fleetune.coordinator.metrics.summarise import summarise
from fleetune.coordinator.metrics.summary import Summary
from fleetune.coordinator.queries.run_status import StatusReader
from fleetune.coordinator.reports.live import plain_line
from fleetune.coordinator.reports.page import Page, write_page
from fleetune.coordinator.reports.report import write_report
from fleetune.coordinator.reports.tables import diagnostic_cells
from fleetune.coordinator.rounds.engine_state import EngineState
from fleetune.coordinator.rounds.records import Ledger
from fleetune.protocols.method.diagnostics import Diagnostic
from fleetune.tools.compare.comparison import Comparison, Configuration
from fleetune.tools.compare.finished_run import FinishedRun
from fleetune.tools.compare.report import ComparisonPage
from fleetune.tools.compare.report import write_page as write_comparison
from fleetune.tools.compare.rows import csv_of

TELLING = "tests.helpers.telling_methods:Telling"
LAYERS = ("conv1", "fc")


def told(rounds=4, devices=2):
    """Device i of round r sends the share (r + i) / 20; a layer's own weight grows from 10 % by the round."""

    def of_update(number, index):
        return {"sent": (number + index) / 20, "peak": {layer: float(number + index) for layer in LAYERS}}

    def of_round(number):
        return {"spread": 1.5 * number, "kept": {"conv1": 0.1, "fc": 0.1 + 0.01 * number}}

    records = []
    for record in records_of(devices, rounds, final_evaluation=False):
        replies = enumerate(record.devices.items())
        inside = {
            name: replace(reply, diagnostics=of_update(record.number, i)) for i, (name, reply) in replies
        }
        records.append(replace(record, devices=inside, diagnostics=of_round(record.number)))
    return records


def summary_of(records, diagnostics=DIAGNOSTICS):
    ledger = Ledger()
    for device in records[0].devices:
        ledger.of(device)
    return summarise(
        settings_of(TELLING), tiny_spec(), records, ledger, {}, simulated=True, diagnostics=diagnostics
    )


def test_the_summary_has_the_course_of_each_figure():
    summary = summary_of(told())
    written = json.loads(msgspec.json.encode(summary))
    assert list(written)[-1] == "diagnostics"
    assert list(written["diagnostics"]) == ["sent", "peak", "spread", "kept"]
    sent = written["diagnostics"]["sent"]
    assert sent["rounds"] == [1, 2, 3, 4]
    assert sent["mean"] == pytest.approx([0.075, 0.125, 0.175, 0.225])
    assert sent["least"] == pytest.approx([0.05, 0.1, 0.15, 0.2])
    assert sent["greatest"] == pytest.approx([0.1, 0.15, 0.2, 0.25])
    assert sent["value"] == pytest.approx(0.15)  # of updates the mean over the run
    assert (sent["title"], sent["about"]) == (SENT.title, SENT.about)
    assert "parts" not in sent
    kept = written["diagnostics"]["kept"]
    assert kept["parts"] == {"conv1": [0.1] * 4, "fc": pytest.approx([0.11, 0.12, 0.13, 0.14])}
    assert kept["value"] == pytest.approx(0.12)  # of the state the last
    assert written["diagnostics"]["spread"]["value"] == 6.0
    rows = written["by_device"]
    assert rows["device-001"]["metrics"] == {"method.sent": pytest.approx(0.175), "method.peak": 3.5}
    assert msgspec.json.decode(msgspec.json.encode(summary), type=Summary) == summary


def test_a_method_that_tells_nothing_has_the_same_summary_as_ever():
    records = records_of(2, 3)
    assert summary_of(records) == summary_of(records, diagnostics=())
    assert b"diagnostics" not in msgspec.json.encode(plain_summary(records))
    assert diagnostics_line(records[0], DIAGNOSTICS) == ""


def test_a_figure_that_comes_late_or_loses_parts_has_gaps():
    records = told()
    late = [
        replace(records[0], diagnostics={}),
        *records[1:3],
        replace(records[3], diagnostics={"kept": {"fc": 0.5}}),
    ]
    found = histories(DIAGNOSTICS, late)
    assert found["spread"].rounds == [2, 3]
    assert found["kept"].parts["conv1"] == [0.1, 0.1, None]


def test_in_a_long_run_rounds_are_put_together_and_none_is_lost():
    """Every third round another value: a course of every third round would not show it."""
    records = [
        replace(one, diagnostics={"spread": float(one.number % 3 == 0)})
        for one in records_of(1, 3 * MAX_POINTS, final_evaluation=False)
    ]
    spread = histories([SPREAD], records)["spread"]
    assert len(spread.rounds) == MAX_POINTS
    assert spread.rounds[-1] == 3 * MAX_POINTS
    assert set(spread.least) == {0.0}
    assert set(spread.greatest) == {1.0}
    assert spread.mean == pytest.approx([1 / 3] * MAX_POINTS)


def test_the_page_says_of_each_figure_what_it_is_and_shows_it(tmp_path):
    records = told()
    write_report(tmp_path, settings_of(TELLING), summary_of(records), records, durable=False)
    outline = Outline((tmp_path / "report.html").read_bytes())
    text = " ".join(outline.texts)
    assert "Diagnostics of the method" in text
    for diagnostic in DIAGNOSTICS:
        assert text.count(diagnostic.about) == 1
    assert "own weight r_ii by layers" in text
    assert "10.0–14.0 %" in text  # noqa: RUF001 - an en dash


def test_a_page_without_anything_inside_has_no_such_section():
    summary = plain_summary(records_of(2, 3))
    assert b"Diagnostics of the method" not in write_page(Page("plant", summary))


def test_a_rounds_line_says_it_in_ascii():
    line = plain_line(told()[0], settings_of(TELLING))
    assert line.isascii()
    assert line.endswith(
        "diagnostics: share sent 7.5 % (5.0-10.0 %), greatest weight 1.5 by layers, spread 1.5, "
        "own weight r_ii 10.0-11.0 % by layers"
    )
    assert "diagnostics" not in plain_line(told()[0], settings_of("nowhere:Method"))


@pytest.mark.parametrize("width", [20, 40, 80, 150])
def test_the_live_view_says_it_in_one_line_that_is_cut(width):
    reader = StatusReader(settings_of(TELLING), 1000)
    for record in told():
        reader.add(record)
    shot = reader.status(EngineState(), Ledger(), 5.0)
    assert shot.diagnostics.startswith("share sent 22.5 % (20.0–25.0 %), ")  # noqa: RUF001 - an en dash
    lines = screen(snapshot(3, diagnostics=shot.diagnostics), width)
    (line,) = (one for one in lines if one.startswith("diagnostics"))
    assert len(line) <= width
    assert len(lines) == len(screen(snapshot(3), width)) + 1


def test_hostile_names_of_parts_steer_no_terminal_and_stay_text_on_the_page():
    hostile = "\x1b[31m<script>alert(1)</script>$\\x$"
    bad = Diagnostic("bad", hostile, hostile, "number", "round", "layers")
    records = [
        replace(one, diagnostics={"bad": {hostile: 1.0}}) for one in records_of(1, 2, final_evaluation=False)
    ]
    summary = summary_of(records, [bad])
    assert "\x1b" not in "\n".join(screen(snapshot(1, diagnostics=diagnostics_line(records[0], [bad]))))
    outline = Outline(write_page(Page("plant", summary)))
    assert "script" not in outline.tags
    assert f"{hostile}." in outline.texts


def test_a_row_of_the_page_says_how_each_began_and_ended():
    cells = diagnostic_cells(summary_of(told()).diagnostics_by_name["kept"])
    assert cells == ["own weight r_ii by layers", "10.0–11.0 %", "10.0–14.0 %", "10.0–14.0 %"]  # noqa: RUF001


def test_a_figure_is_a_metric_like_any_other():
    first, *_ = records = told()
    sent, peak, spread, kept = map(metric_of, DIAGNOSTICS)
    assert [one.name for one in (sent, peak)] == ["method.sent", "method.peak"]
    assert sent.of_round(first) == pytest.approx(0.075)
    assert peak.of_round(first) == 1.5
    assert spread.of_round(first) == 1.5
    assert kept.of_round(first) == pytest.approx(0.105)
    assert kept.of_reply(first.devices["device-000"]) is None
    assert sent.of_run(summary_of(records)) == pytest.approx(0.15)
    assert {one.unit.sign for one in (sent, kept)} == {"%"}


def test_a_comparison_has_them_as_its_last_columns():
    ours, others = summary_of(told()), plain_summary(records_of(2, 4))
    runs = (FinishedRun("ours", 1, ours, told()), FinishedRun("fedavg", 1, others, records_of(2, 4)))
    contenders = tuple(Configuration(label, {"name": label}) for label in ("ours", "fedavg"))
    comparison = Comparison("duel", contenders, (1,), runs, None)
    (mine, theirs) = csv.DictReader(io.StringIO(csv_of(comparison.run_rows()).decode()))
    assert list(mine)[-4:] == [f"method.{one.name}" for one in (SENT, PEAK, SPREAD, KEPT)]
    assert float(mine["method.sent"]) == pytest.approx(0.15)
    assert theirs["method.sent"] == ""
    text = " ".join(Outline(write_comparison(ComparisonPage(comparison, {}, [], ""))).texts)
    assert "Diagnostics of the methods" in text
    assert text.count(KEPT.about) == 1


@pytest.mark.parametrize(
    ("about", "told"),
    [
        ("layers that it sent", "Layers that it sent."),
        ("r_ii, its own share", "r_ii, its own share."),
        ("", "."),
    ],
)
def test_a_phrase_is_told_as_a_sentence(about, told):
    assert as_sentence(about) == told
    assert as_sentence("Whole sentences stay.") == "Whole sentences stay."
