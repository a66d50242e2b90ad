"""The report, tables and pictures of small hand-made runs."""

import base64
import importlib.util
import io
from html.parser import HTMLParser

import msgspec
import pytest
from rich.console import Console
from tests.conftest import tiny_spec

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.metrics.personal_scores import gains, personal, with_personal
from fleetune.coordinator.metrics.registry import DURATION, METRICS
from fleetune.coordinator.metrics.summarise import (
    Pair,
    errors_of,
    pairs_of,
    predicted_vs_actual,
    summarise,
)
from fleetune.coordinator.metrics.summary import Errors, Summary
from fleetune.coordinator.reports.page import Page, write_page
from fleetune.coordinator.reports.pictures.plots import Story, draw
from fleetune.coordinator.reports.pictures.theme import png
from fleetune.coordinator.reports.report import NO_PICTURES, write_report
from fleetune.coordinator.reports.tables import device_table, prediction_rows, refused, run_table
from fleetune.coordinator.rounds.records import DeviceRound, Ledger, RoundRecord, Traffic
from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.settings.run_toml import parse_run
from fleetune.protocols.wire.messages import read_from_device
from fleetune.protocols.wire.payloads import Measures

HOSTILE = '<script>alert("$\\x$")</script>&amp;'
TRAINING = next(metric for metric in METRICS if metric.name == "train_s")
PICTURES = {"accuracy-by-round", "accuracy-by-uplink", "bytes-by-round", "accuracy-by-device"}


def settings_of(method="fedspu", name="plant"):
    return parse_run({"run": {"name": name}, "model": {"name": "tiny"}, "method": {"name": method}})


def reply(before, after, personal=None, up=100, down=90, samples=10):
    measures = Measures(samples, 5, 0.5, before, after, personal)
    return DeviceRound(0.4, down, up, measures, RoundCost(download_s=0.1, train_s=0.2, upload_s=0.3))


def records_of(num_devices, rounds, *, lift=0.0, final_evaluation=True):
    """Device i of n in round r of at most 9: before r / 20, after r / 20 + i / (4 n) + lift."""
    names = [f"device-{index:03d}" for index in range(num_devices)]

    def after(number, index):
        return number / 20 + index / (4 * num_devices) + lift

    records = [
        RoundRecord(
            number=number,
            attempt=1,
            final_evaluation=False,
            opened_s=10.0 * (number - 1),
            closed_s=10.0 * number,
            participants=tuple(names),
            devices={name: reply(number / 20, after(number, i)) for i, name in enumerate(names)},
        )
        for number in range(1, rounds + 1)
    ]
    if final_evaluation:
        last = {n: reply(0.5, 0.6 + lift, personal=after(rounds, i)) for i, n in enumerate(names)}
        records.append(RoundRecord(rounds + 1, 1, True, 10.0 * rounds, 10.0 * rounds + 5, tuple(names), last))
    return records


def predicted_records(num_devices=2, rounds=7, **options):
    """Every round takes 0.6 s and 300 J; in round r all expected 0.1 / r s more of the training."""
    measured = RoundCost(download_s=0.1, train_s=0.2, upload_s=0.3, memory_bytes=1000, joules=300.0)

    def told(number, reply):
        wrong = msgspec.structs.replace(measured, train_s=0.2 + 0.1 / number, bytes_up=110, joules=None)
        return msgspec.structs.replace(reply, actual=measured, predicted=wrong)

    return [
        msgspec.structs.replace(
            record, devices={name: told(record.number, one) for name, one in record.devices.items()}
        )
        for record in records_of(num_devices, rounds, **options)
    ]


def summary_of(records, method="fedspu", refusals=None, counters=None, reports=None):
    ledger = Ledger(refusals=refusals or {}, began_at=0.0, ended_at=99.0)
    for record in records:
        for name, answer in record.devices.items():
            one = ledger.of(name)
            if not record.final_evaluation:
                one.up, one.down = one.up + answer.bytes_up, one.down + answer.bytes_down
                one.updates, one.tasks = one.updates + 1, one.tasks + 1
    settings = settings_of(method)
    return summarise(settings, tiny_spec(), records, ledger, counters or {}, reports=reports, simulated=True)


def fleet(num_devices=6, rounds=4, **options):
    records = records_of(num_devices, rounds, lift=0.1, **options)
    rivals = {
        "local-only": summary_of(records_of(num_devices, rounds), "local-only"),
        "fedavg": summary_of(records_of(num_devices, rounds, lift=0.2), "fedavg"),
    }
    return records, summary_of(records), rivals


def shown(renderable, width=80):
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(renderable)
    return console.file.getvalue()


class Outline(HTMLParser):
    """Tags, addresses and text of a page, as a browser reads them."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.addresses, self.texts = [], [], []
        self.feed(page.decode())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "srcset", "href")]

    def handle_data(self, data):
        self.texts.append(data)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (9949, "9.9 kB"),
        (41_400, "41 kB"),
        (999_499, "999 kB"),
        (999_500, "1.0 MB"),
        (5e15, "5000 TB"),
        (None, readable.UNKNOWN),
    ],
)
def test_sizes_have_two_or_three_figures(num_bytes, text):
    assert readable.size(num_bytes) == text


@pytest.mark.parametrize(
    ("time_s", "text"),
    [
        (0, "0 s"),
        (0.045, "45 ms"),
        (0.9996, "1.0 s"),
        (2.14, "2.1 s"),
        (42.4, "42 s"),
        (59.7, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3599.6, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (None, readable.UNKNOWN),
    ],
)
def test_durations_change_their_unit(time_s, text):
    assert readable.duration(time_s) == text


def test_what_a_peer_wrote_cannot_steer_the_terminal():
    assert readable.printable("a\x1b[2Jb\nc") == "a�[2Jb�c"


def test_run_table_has_the_numbers_of_every_method():
    _, summary, rivals = fleet()
    lines = [" ".join(line.split()) for line in shown(run_table(summary, rivals)).splitlines()[3:]]
    of_dense = f"{100 * 100 / (4 * tiny_spec().num_parameters):.1f} %"
    # personal after round 4: 0.2 + i / 24 + lift, i = 0..5
    assert lines[0] == "local-only 30.4 % 30.4 % 20.0 % 50.0 → 60.0 % 2.4 kB 2.2 kB 40 s"
    assert lines[4] == "fedspu 40.4 % 40.4 % 30.0 % 50.0 → 70.0 % 2.4 kB 2.2 kB 40 s"
    assert lines[5].startswith(of_dense)
    assert summary.bytes.share_down == pytest.approx(90 / (4 * tiny_spec().num_parameters))


def test_device_table_shows_what_each_device_gained():
    _, summary, rivals = fleet()
    text = shown(device_table(summary, rivals, boards={"device-000": "raspberry-pi-4b"}))
    row = next(line for line in text.splitlines() if line.startswith("device-000"))
    assert " ".join(row.split()) == "device-000 rpi-4b 0.4 10 20.0 % 30.0 % +10.0 400 B 360 B"


def test_device_table_without_rivals_shows_the_final_evaluation():
    _, summary, _ = fleet()
    row = next(line for line in shown(device_table(summary)).splitlines() if line.startswith("device-005"))
    assert "50.8 %" in row
    assert "50.0 → 70.0 %" in row


def test_device_table_of_many_devices_shows_the_worst():
    _, summary, rivals = fleet(300, 2)
    text = shown(device_table(summary, rivals, limit=5))
    assert [line.split()[0] for line in text.splitlines() if line.startswith("device-")] == [
        f"device-00{index}" for index in range(5)
    ]
    assert "the 5 of 300 devices that do worst" in text


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize("num_devices", [0, 6, 300])
def test_tables_fit_the_terminal(width, num_devices):
    records = records_of(num_devices, 2) if num_devices else []
    summary = summary_of(records)
    rivals = {"local-only": summary_of(records, "local-only")}
    boards = dict.fromkeys(summary.by_device, "a-board-whose-name-is-far-too-long-for-any-table")
    for table in run_table(summary, rivals), device_table(summary, rivals, boards=boards):
        assert max(map(len, shown(table, width).splitlines()), default=0) <= width


def test_personal_accuracy_without_a_final_evaluation_is_that_of_the_last_reply():
    records, summary, _ = fleet(final_evaluation=False)
    assert summary.accuracy.personal_mean is None
    filled = with_personal(summary, records)
    assert personal(filled)["device-000"] == records[-1].devices["device-000"].measures.after
    assert filled.accuracy.personal_mean == pytest.approx(0.3 + 2.5 / 24)
    assert filled.accuracy.personal_weighted == pytest.approx(0.3 + 2.5 / 24)
    assert summary.accuracy.personal_mean is None


def test_a_final_evaluation_is_not_filled_in():
    records, summary, _ = fleet()
    assert with_personal(summary, records) == summary


def test_gains_are_of_devices_that_both_know():
    _, summary, rivals = fleet()
    del rivals["local-only"].by_device["device-001"]
    found = gains(summary, rivals["local-only"])
    assert "device-001" not in found
    assert found["device-002"] == pytest.approx(0.1)


def test_refusals_are_said_once_with_their_meaning():
    refusals = {"late": 3, "PacketCorrupt": 1, "abandoned-deadline": 2}
    counters = {"late": 3, "abandoned": 2, "declined": 5, "gone": 0}
    kinds = refused(summary_of([], refusals=refusals, counters=counters))
    assert [(kind, count) for kind, count, _ in kinds] == [
        ("declined", 5),
        ("late", 3),
        ("abandoned-deadline", 2),
        ("PacketCorrupt", 1),
    ]
    assert all(meaning for _, _, meaning in kinds)


def test_report_writes_every_file_and_the_summary_comes_back(tmp_path):
    records, summary, rivals = fleet()
    files = write_report(tmp_path, settings_of(), summary, records, rivals=rivals, durable=False)
    names = {path.name for path in files}
    pictures = {f"{name}.png" for name in PICTURES}
    assert names == {"summary.json", "rounds.jsonl", "report.html"} | pictures
    assert {path.name for path in tmp_path.iterdir()} == names
    assert msgspec.json.decode((tmp_path / "summary.json").read_bytes(), type=Summary) == summary
    lines = (tmp_path / "rounds.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(line, type=RoundRecord) for line in lines] == records
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in pictures)


def test_page_says_what_ran_and_how_it_went(tmp_path):
    (tmp_path / "run.toml").write_text('[run]\nname = "plant"  # in the <b>yard</b>\n')
    records, _, rivals = fleet()
    summary = summary_of(records, refusals={"late": 7})
    write_report(
        tmp_path, settings_of(), summary, records, rivals=rivals, boards={"device-003": "jetson-nano"}
    )
    page = Outline((tmp_path / "report.html").read_bytes())
    text = " ".join(page.texts)
    parameters = f"{tiny_spec().num_parameters:,} parameters"
    for wanted in (
        "plant",
        f"fedspu on tiny ({parameters})",
        "6 devices · 4 rounds · seed 0 · simulated",
        "40.4 %",
    ):
        assert wanted in text
    for wanted in (
        "+10.0 over local-only",
        "-10.0 over fedavg",
        "jetson-nano",
        "in the <b>yard</b>",
        "closed already",
    ):
        assert wanted in text
    assert page.tags.count("figure") == len(PICTURES)


def test_page_needs_nothing_from_outside(tmp_path):
    records, summary, _ = fleet()
    write_report(tmp_path, settings_of(), summary, records)
    page = Outline((tmp_path / "report.html").read_bytes())
    assert len(page.addresses) == len(PICTURES)
    for address in page.addresses:
        kind, _, data = address.partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data, validate=True).startswith(b"\x89PNG")
    assert not {"script", "link", "iframe"} & set(page.tags)


def test_whatever_names_hold_stays_text():
    summary = summary_of(records_of(2, 1), refusals={HOSTILE: 1})
    rows = {HOSTILE: summary.by_device["device-001"]}
    summary = msgspec.structs.replace(summary, method=HOSTILE, model=HOSTILE, by_device=rows)
    rivals = {HOSTILE + "2": summary}
    plain = Outline(write_page(Page("plant", summary_of(records_of(2, 1)), rivals, run_file="")))
    page = Outline(write_page(Page(HOSTILE, summary, rivals, {HOSTILE: HOSTILE}, run_file=HOSTILE)))
    assert "script" not in page.tags
    assert {*page.tags} == {*plain.tags}
    assert sum(text.count(HOSTILE) for text in page.texts) >= 8


def test_a_dollar_or_markup_in_a_device_name_can_be_drawn():
    records = [
        msgspec.structs.replace(one, devices={HOSTILE: reply(0.1, 0.2, 0.3)}) for one in records_of(1, 2)
    ]
    figures = draw(Story(summary_of(records), records))
    assert png(figures["accuracy-by-device"]).startswith(b"\x89PNG")


def test_without_matplotlib_the_rest_is_written(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    records, summary, rivals = fleet()
    files = write_report(tmp_path, settings_of(), summary, records, rivals=rivals)
    assert {path.name for path in files} == {"summary.json", "rounds.jsonl", "report.html"}
    assert NO_PICTURES in " ".join(Outline((tmp_path / "report.html").read_bytes()).texts)
    assert [record.getMessage() for record in caplog.records] == [NO_PICTURES]


def test_a_run_that_closed_no_round_has_a_report(tmp_path):
    files = write_report(tmp_path, settings_of(), summary_of([]), [])
    assert {path.name for path in files} == {"summary.json", "rounds.jsonl", "report.html"}
    assert "figure" not in Outline((tmp_path / "report.html").read_bytes()).tags


def test_devices_without_test_samples_have_bytes_only():
    records = [
        RoundRecord(1, 1, False, 0.0, 1.0, ("a",), {"a": reply(None, None)}),
        RoundRecord(2, 1, True, 1.0, 2.0, ("a",), {"a": reply(None, None)}),
    ]
    assert set(draw(Story(summary_of(records), records))) == {"bytes-by-round"}


@pytest.mark.parametrize("num_devices", [1, 31])
def test_pictures_of_few_and_many_devices(num_devices):
    records, summary, rivals = fleet(num_devices, 2)
    figures = draw(Story(summary, records, rivals))
    assert set(figures) == PICTURES
    curves = [line for line in figures["accuracy-by-device"].axes[0].get_lines() if len(line.get_xdata()) > 1]
    assert len(curves) == (3 if num_devices > 1 else 0)
    own = sorted(100 * one for one in personal(summary).values())
    assert not curves or list(curves[-1].get_ydata()) == pytest.approx(own)


def test_curves_are_the_means_of_the_rounds():
    records, summary, _ = fleet()
    axes = draw(Story(summary, records))["accuracy-by-round"].axes[0]
    before, after = (line for line in axes.get_lines() if len(line.get_xdata()) > 1)
    assert list(before.get_xdata()) == [1, 2, 3, 4]
    assert list(before.get_ydata()) == pytest.approx([5, 10, 15, 20])
    assert list(after.get_ydata()) == pytest.approx([5 * r + 10 + 250 / 24 for r in range(1, 5)])


def test_bytes_of_a_round_stand_against_whole_models():
    records, summary, _ = fleet()
    lines = draw(Story(summary, records))["bytes-by-round"].axes[0].get_lines()
    dense, up, down = (list(line.get_ydata()) for line in lines if len(line.get_xdata()) > 1)
    unit = 1000 if 6 * 4 * tiny_spec().num_parameters >= 1000 else 1
    assert dense == pytest.approx([6 * 4 * tiny_spec().num_parameters / unit] * 4)
    assert (up, down) == (pytest.approx([600 / unit] * 4), pytest.approx([540 / unit] * 4))


def test_traffic_is_counted_by_the_ledger_not_by_the_records():
    ledger = Ledger(traffic={"a": Traffic(up=7, down=8)})
    summary = summarise(settings_of(), tiny_spec(), [], ledger, {}, simulated=False)
    assert "7 B" in shown(device_table(summary))


def test_predictions_stand_against_what_was_counted_and_measured():
    found = predicted_vs_actual(predicted_records())
    seconds = [0.1 / number / 0.6 for number in range(1, 8) for _ in range(2)]
    assert found["seconds"].overall.pairs == 14
    assert found["seconds"].overall.median == pytest.approx(seconds[7])
    assert found["seconds"].overall.worst_decile == pytest.approx(seconds[1])
    assert found["seconds"].after_five_rounds.pairs == 4
    assert found["seconds"].after_five_rounds.worst_decile == pytest.approx(0.1 / 6 / 0.6)
    assert found["train_s"].overall.worst_decile == pytest.approx(0.5)
    assert found["upload_s"].overall.median == found["memory_bytes"].overall.median == 0
    assert found["bytes_up"].overall.median == pytest.approx(0.1)  # 110 of the 100 that were counted
    assert found["bytes_down"] is None  # nobody said
    assert found["joules"] is None


def test_a_device_that_misses_rounds_has_still_to_learn():
    records = predicted_records(rounds=8)
    late = [
        msgspec.structs.replace(one, devices={n: r for n, r in one.devices.items() if n != "device-001"})
        for one in records[:3]
    ] + records[3:]
    learned = {(pair.device, pair.round) for pair in pairs_of(late, DURATION) if pair.learned}
    assert learned == {("device-000", 6), ("device-000", 7), ("device-000", 8)}


def test_a_final_evaluation_is_no_round_to_predict():
    records = predicted_records(rounds=1)
    assert records[-1].final_evaluation
    assert {pair.round for pair in pairs_of(records, DURATION)} == {1}


@pytest.mark.parametrize(
    ("predicted", "actual"),
    [
        (RoundCost(), RoundCost(train_s=1.0)),
        (RoundCost(train_s=1.0), RoundCost()),
        (RoundCost(train_s=1.0), RoundCost(train_s=0.0)),
    ],
)
def test_what_is_not_known_or_took_nothing_is_no_pair(predicted, actual):
    answer = msgspec.structs.replace(reply(0.1, 0.2), predicted=predicted, actual=actual)
    record = msgspec.structs.replace(records_of(1, 1)[0], devices={"device-000": answer})
    assert pairs_of([record], TRAINING) == []
    assert predicted_vs_actual([record]) is None


@pytest.mark.parametrize(
    ("wrong", "median", "worst"),
    [([3], 0.03, 0.03), ([1, 2, 9], 0.02, 0.09), (range(1, 11), 0.055, 0.09), (range(1, 101), 0.505, 0.9)],
)
def test_the_worst_decile_is_what_a_tenth_reaches_or_exceeds(wrong, median, worst):
    found = errors_of(Pair("a", 1, 100 + w, 100, learned=True) for w in wrong)
    assert found == Errors(len(wrong), pytest.approx(median), worst)


def test_an_error_counts_alike_above_and_below():
    assert Pair("a", 1, 75, 100, learned=True).error == Pair("a", 1, 125, 100, learned=True).error == 0.25


def test_summary_has_energy_seconds_and_reasons_where_they_are_known():
    reports = {"device-000": DeviceReport("device-000", reason="p = 0.4: as wanted")}
    summary = summary_of(predicted_records(rounds=3), reports=reports)
    assert summary.joules == pytest.approx(2 * 3 * 300.0)
    row = summary.by_device["device-000"]
    assert (row.reason, row.joules) == ("p = 0.4: as wanted", pytest.approx(900.0))
    assert (row.predicted_s, row.actual_s) == (pytest.approx(0.65), pytest.approx(0.6))
    other = summary_of(records_of(2, 3))
    assert other.joules is other.predicted_vs_actual is None
    row = other.by_device["device-000"]
    assert row.reason is row.joules is row.predicted_s is None


def test_page_shows_predictions_energy_and_why_a_device_took_its_ratio(tmp_path):
    records = predicted_records()
    records[0].devices["device-001"] = msgspec.structs.replace(records[0].devices["device-001"], ratio=0.2)
    reports = {"device-001": DeviceReport("device-001", reason=f"p = 0.4: {HOSTILE}")}
    summary = summary_of(records, reports=reports)
    write_report(tmp_path, settings_of(), summary, records, durable=False)
    page = Outline((tmp_path / "report.html").read_bytes())
    text = " ".join(page.texts)
    assert "script" not in page.tags
    for wanted in (
        "Predictions",
        "time",
        "0.4 (0.2–0.4)",  # noqa: RUF001
        f"p = 0.4: {HOSTILE}",
        "600 / 625 ms",
        "measured by 2 of 2 devices",
        "4.2 kJ",
    ):
        assert wanted in text
    assert page.tags.count("figure") == len(PICTURES)


def test_a_run_without_predictions_does_not_speak_of_them(tmp_path):
    records = records_of(2, 2)
    write_report(tmp_path, settings_of(), summary_of(records), records, durable=False)
    text = " ".join(Outline((tmp_path / "report.html").read_bytes()).texts)
    assert "Predictions" not in text
    assert "Energy" not in text
    assert prediction_rows(summary_of(records)) == []


def test_prediction_rows_have_pairs_and_errors():
    rows = {title: cells for title, *cells in prediction_rows(summary_of(predicted_records()))}
    assert rows["time"] == ["14", "4.2 %", "17 %", "2.6 %", "2.8 %"]
    assert rows["sent down"] == ["0", *[readable.UNKNOWN] * 4]


@pytest.mark.parametrize(
    ("actual_s", "predicted_s", "text"),
    [
        (15.13, 14.2, "15.1 / 14.2 s"),
        (None, 14.2, f"{readable.UNKNOWN} / 14.2 s"),
        (725, 600, "12.1 / 10.0 min"),
        (0.05, 0.04, "50.0 / 40.0 ms"),
        (3e6, None, f"833 / {readable.UNKNOWN} h"),
        (0.0, 0.0, readable.UNKNOWN),
        (None, None, readable.UNKNOWN),
    ],
)
def test_took_and_expected_share_a_unit(actual_s, predicted_s, text):
    assert readable.against(actual_s, predicted_s) == text


@pytest.mark.parametrize("claim", ['"memory_bytes":1' + "0" * 400, '"train_s":1e300', '"joules":-1.0'])
def test_a_claim_that_no_report_could_reckon_with_is_refused_when_it_arrives(claim):
    said = f'{{"type":"Measured","run":"r","round":1,"attempt":1,"actual":{{{claim}}}}}'
    with pytest.raises(PacketCorrupt):
        read_from_device(said.encode())


@pytest.mark.parametrize(
    ("joules", "text"), [(None, readable.UNKNOWN), (0.186, "0.19 J"), (950, "950 J"), (41_400, "41 kJ")]
)
def test_energy_has_two_or_three_figures(joules, text):
    assert readable.energy(joules) == text
