"""The table of metrics: a new one is one entry, and every view says of it what the table says."""

import csv
import io
import json
import re
from dataclasses import replace

import msgspec
import pytest
from rich.console import Console
from tests.coordinator.reports.test_live import SETTINGS, ledger, training_state
from tests.coordinator.reports.test_report import (
    Outline,
    fleet,
    predicted_records,
    settings_of,
    shown,
    summary_of,
)

from fleetune.coordinator.metrics import registry
from fleetune.coordinator.metrics.averages import greatest
from fleetune.coordinator.metrics.metric import BYTES, Metric
from fleetune.coordinator.metrics.registry import (
    ADOPTED,
    BELOW_LOCAL_ONLY,
    BYTES_DOWN_PAPER,
    BYTES_UP_PAPER,
    DEPLOYED,
    ENERGY,
    EPSILON,
    EVERYWHERE,
    GAIN_OVER_LOCAL_ONLY,
    LOCAL_ONLY,
    METRICS,
    PERSONAL_MEAN_ALL,
    STEPS,
    VALIDATION,
    VALIDATION_MEAN,
    predicted_metrics,
    shown_at,
)
from fleetune.coordinator.metrics.summary import Summary
from fleetune.coordinator.queries.run_status import StatusReader
from fleetune.coordinator.reports import live, page, tables
from fleetune.coordinator.reports.live import LiveView, plain_line
from fleetune.coordinator.reports.report import write_report
from fleetune.coordinator.reports.tables import device_table, prediction_rows, run_table
from fleetune.protocols.round_cost import RoundCost
from fleetune.tools.compare.columns import COLUMNS, costs, row_of
from fleetune.tools.compare.comparison import Comparison, Configuration, Spread
from fleetune.tools.compare.finished_run import FinishedRun
from fleetune.tools.compare.rows import csv_of
from fleetune.tools.compare.tables import comparison_tables

SWAP = Metric(
    "swap_bytes",
    "swapped",
    "What a board swapped during a round.",
    BYTES,
    reply=lambda reply: 3 * reply.bytes_up * 10**6,  # 300 MB
    predicted=lambda reply: 3 * 10**8,
    over_rounds=greatest,
    over_devices=greatest,
    shown=EVERYWHERE,
)


@pytest.fixture
def swap(monkeypatch):
    """One entry more; nothing else is changed anywhere."""
    monkeypatch.setattr(registry, "METRICS", (*METRICS, SWAP))


def test_a_new_metric_is_one_entry_and_stands_in_the_summary(swap):
    records, _, _ = fleet()
    told = json.loads(msgspec.json.encode(summary_of(records)))
    assert told["metrics"] == {"swap_bytes": 3e8}
    assert list(told)[-1] == list(told["by_device"]["device-000"])[-1] == "metrics"
    assert {row["metrics"]["swap_bytes"] for row in told["by_device"].values()} == {3e8}
    assert told["predicted_vs_actual"]["swap_bytes"]["overall"]["median"] == 0
    read = msgspec.json.decode(msgspec.json.encode(told), type=Summary)
    assert SWAP.of_run(read) == SWAP.of_device(read.by_device["device-000"]) == 3e8


def test_a_new_metric_stands_in_every_table_and_on_the_page(swap, tmp_path):
    records = predicted_records()
    summary = summary_of(records)
    for table in run_table(summary), device_table(summary):
        text = shown(table, width=160)
        assert "swapped" in text
        assert "300 MB" in text
    assert ["swapped", "14", "0.0 %"] in [row[:3] for row in prediction_rows(summary)]
    write_report(tmp_path, settings_of(), summary, records, rivals={"fedavg": summary}, durable=False)
    text = " ".join(Outline((tmp_path / "report.html").read_bytes()).texts)
    assert text.lower().count("swapped") == 4  # a card, and a column of methods, devices and predictions
    assert text.count("300 MB") == 1 + 2 + 2


def test_a_new_metric_stands_in_the_live_view_and_in_a_rounds_line(swap):
    records, _, _ = fleet()
    assert plain_line(records[0], SETTINGS).endswith("10 s  swapped 300 MB")
    reader = StatusReader(SETTINGS, 1000)
    reader.add(msgspec.structs.replace(records[0], devices={"busy": records[0].devices["device-000"]}))
    status, devices = (
        reader.status(training_state(), ledger(), 130.0),
        reader.devices(training_state(), ledger()),
    )
    screen = LiveView(status, devices).render(width=120)
    text = shown(screen, width=120)
    assert "swapped" in text
    assert text.count("300 MB") == 1


def compared(records, summary):
    runs = tuple(FinishedRun("ours", seed, summary, records[:-1]) for seed in (1, 2))
    return Comparison("duel", (Configuration("ours", {"name": "ours"}),), (1, 2), runs, None)


def test_a_new_metric_stands_in_a_comparison_and_its_csv(swap):
    records, _, _ = fleet()
    comparison = compared(records, summary_of(records))
    (row, _) = csv.DictReader(io.StringIO(csv_of(comparison.run_rows()).decode()))
    assert list(row)[-1] == "swap_bytes"
    assert float(row["swap_bytes"]) == 3e8
    assert comparison.spread("ours", SWAP) == Spread(3e8, 0, 2)
    console = Console(file=io.StringIO(), width=200)
    console.print(comparison_tables(comparison))
    assert "swapped" in console.file.getvalue()
    assert "300 MB" in console.file.getvalue()


def test_without_it_nothing_says_anything_of_it(tmp_path):
    records = predicted_records()
    summary = summary_of(records)
    assert b'"metrics"' not in msgspec.json.encode(summary)
    write_report(tmp_path, settings_of(), summary, records, durable=False)
    assert b"swapped" not in (tmp_path / "report.html").read_bytes()
    assert "swap_bytes" not in csv_of(compared(records, summary).run_rows()).decode()


def test_a_metric_that_no_device_told_takes_no_column(monkeypatch):
    silent = replace(SWAP, reply=lambda reply: None)
    monkeypatch.setattr(registry, "METRICS", (*METRICS, silent))
    summary = summary_of(fleet()[0])
    assert summary.metrics == {"swap_bytes": None}
    assert "swapped" not in shown(run_table(summary), 160) + shown(device_table(summary), 160)


def test_names_are_stable_and_each_stands_once():
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in names)
    assert all(metric.title and metric.about.endswith(".") for metric in METRICS)


def test_what_is_predicted_is_in_the_order_of_summary_json_and_covers_the_costs_of_a_round():
    predicted = predicted_metrics()
    names = [
        "seconds",
        "download_s",
        "train_s",
        "processor_s",
        "upload_s",
        "bytes_down",
        "bytes_up",
        "memory_bytes",
        "joules",
    ]
    assert [metric.name for metric in predicted] == names
    assert set(RoundCost.__struct_fields__) - {"compression_error"} <= {metric.name for metric in predicted}


def by_hand(columns):
    return {metric.name for column in columns for metric in column.metrics}


@pytest.mark.parametrize(
    ("place", "names"),
    [
        ("live", live._BY_HAND),
        ("run table", by_hand(tables._RUN)),
        ("device table", by_hand(tables._OF_DEVICES)),
        ("run page", by_hand(page._IN_CARDS)),
        ("run page", by_hand(page._IN_METHODS)),
        ("device page", by_hand(page._IN_DEVICES)),
        ("comparison", {metric.name for metric, _ in COLUMNS if metric in METRICS}),
    ],
)
def test_what_a_view_places_by_hand_the_registry_shows_there(place, names):
    where_known = (  # in runs that have them
        *(LOCAL_ONLY, GAIN_OVER_LOCAL_ONLY, ADOPTED, BELOW_LOCAL_ONLY, DEPLOYED, ENERGY),
        *(PERSONAL_MEAN_ALL, VALIDATION, VALIDATION_MEAN, BYTES_UP_PAPER, BYTES_DOWN_PAPER, EPSILON),
        *STEPS,
    )
    behind = {metric.name for metric in where_known if place in metric.shown}
    assert names | behind == {metric.name for metric in shown_at(place)}


def test_each_metric_that_is_shown_of_a_run_or_a_device_can_be_read_of_it():
    of_run, of_device = {"run table", "run page", "comparison"}, {"device table", "device page"}
    for metric in METRICS:
        assert metric.run or not of_run.intersection(metric.shown)
        assert metric.device or not of_device.intersection(metric.shown)
        assert metric.reply or metric.round or "live" not in metric.shown


def test_a_table_of_costs_has_what_a_comparison_adds_and_no_accuracy():
    assert [metric.name for metric in costs([])] == ["rounds", "devices", "bytes_up", "bytes_down", "seconds"]
    assert row_of(FinishedRun("x", 0, Summary(method="x"), []), None).values["personal_mean"] is None
