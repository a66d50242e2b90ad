"""The live view: what it shows of a run, and that it fits every screen."""

import dataclasses
import io

import msgspec
import pytest
from rich.console import Console

from fleetune.coordinator.queries.run_status import DeviceStatus, RoundScore, RunStatus, StatusReader
from fleetune.coordinator.reports.live import LiveView, plain_line, sparkline
from fleetune.coordinator.rounds.engine_state import EngineState, Member, RoundAttempt, Timing
from fleetune.coordinator.rounds.records import DeviceRound, Ledger, RoundRecord, Traffic
from fleetune.coordinator.run.run_events import Activity
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.settings.objective import ObjectiveSection
from fleetune.protocols.settings.run_toml import parse_run
from fleetune.protocols.wire.payloads import Measures

SETTINGS = parse_run(
    {
        "run": {"name": "plant", "rounds": 30},
        "model": {"name": "mlp"},
        "method": {"name": "fedspu"},
        "round": {"start_with": 4, "participants": 4},
    }
)
PARAMETERS = 1000
DOINGS = (
    "receiving",
    "training",
    "sending",
    "declined",
    "replied",
    "ready",
    "left",
    "refused",
    "away",
    "working",
)
LONG = "p = 0.4 would need 14.2 s of 12 s (upload 9.1 s at 1.1 Mbit/s), and no smaller p is there"


def reply(before=0.871, after=0.913, up=6833, down=6500, **costs):
    return DeviceRound(0.4, down, up, Measures(10, 5, 0.5, before, after), RoundCost(), **costs)


def record_of(number=12, **changes):
    names = tuple(f"device-{index}" for index in range(6))
    record = RoundRecord(number, 1, False, 100.0, 102.14, names, {name: reply() for name in names})
    return msgspec.structs.replace(record, **changes)


def member(device, **changes):
    return Member(report=DeviceReport(device, board="raspberry-pi-4b", ratio=0.4), ready=True, **changes)


def training_state():
    turn = RoundAttempt(3, 2)
    members = {
        "away": Member(report=DeviceReport("away"), asked=turn),
        "busy": member("busy", asked=turn),
        "declines": member(
            "declines", asked=turn, answer="declined", declined_round=3, declined_reason="too hot"
        ),
        "done": member("done", asked=turn, answer="update"),
        "idle": member("idle"),
        "left": member("left", left=True),
        "refuses": Member(refusal="too little memory"),
    }
    return EngineState(
        stage="training",
        rounds_done=2,
        attempt=2,
        participants=("away", "busy", "declines", "done"),
        timing=Timing(until=160.0),
        members=members,
    )


def ledger():
    traffic = {
        "busy": Traffic(up=1000, down=3000, updates=2, tasks=3),
        "done": Traffic(up=1000, updates=1, tasks=1),
    }
    return Ledger(traffic=traffic, refusals={"late": 2, "PacketCorrupt": 1}, began_at=100.0)


def snapshot(num_devices=6, **changes):
    devices = tuple(
        DeviceStatus(
            device=f"device-{index:03d}",
            doing=DOINGS[index % len(DOINGS)],
            board="raspberry-pi-zero-2w",
            ratio=0.4,
            progress=0.45 if index % len(DOINGS) < 3 else None,
            refusal=LONG,
            declined_reason=LONG,
            ratio_reason=LONG,
            actual_s=725.0,
            predicted_s=600.0,
            before=1.0,
            after=1.0,
            bytes_up=999_000,
            bytes_down=999_000,
        )
        for index in range(num_devices)
    )
    curve = tuple(RoundScore(number, number / 100, number / 50) for number in range(1, 41))
    known = {
        "run": "plant",
        "method": "fedspu",
        "stage": "training",
        "round": 41,
        "rounds": 50,
        "asked": 6,
        "replied": 2,
        "target": 5,
        "round_left_s": 38.2,
        "elapsed_s": 71.0,
        "remaining_s": 185.0,
        "scores": curve,
        "bytes_up": 1_200_000,
        "bytes_down": 1_000_000,
        "dense_up": 2_400_000,
        "dense_down": 2_000_000,
        "refused": {"late": 2, "PacketCorrupt": 1},
        "problem": "cannot reach the broker at 10.0.0.1:1883; is it running, and does the firewall let us? "
        * 3,
    }
    devices = changes.pop("devices", devices)
    return RunStatus(**{**known, **changes}), devices


def shown(shot, width=80, height=24):
    console = Console(width=width, height=height, file=io.StringIO(), color_system=None)
    console.print(LiveView(*shot))
    return console.file.getvalue().splitlines()


def test_a_run_without_a_coordinator_is_shown_as_stopped():
    lines = shown(snapshot(running=False))
    assert lines[1].rstrip() == "round 41 of 50  stopped: no coordinator serves the run"


def test_refused_messages_of_one_word_are_counted_together():
    lines = shown(snapshot(refused={"broker": 16, "late": 2, "PacketForeign": 2, "foreign": 1}))
    assert "refused   16 broker, 2 late, 3 foreign" in [line.rstrip() for line in lines]


def test_a_round_is_one_plain_line():
    line = plain_line(record_of(), SETTINGS)
    assert line == "round 12/30  6/6 replied  accuracy 0.871 -> 0.913  up 41 kB  down 39 kB  2.1 s"


def test_plain_line_of_a_later_attempt_with_replies_missing_and_no_test_samples():
    record = record_of(attempt=2, devices={"device-0": reply(None, None)})
    line = plain_line(record, SETTINGS)
    assert line == "round 12/30 attempt 2  1/6 replied  accuracy - -> -  up 6.8 kB  down 6.5 kB  2.1 s"


def test_plain_line_of_a_final_evaluation_nobody_answered():
    line = plain_line(record_of(31, final_evaluation=True, devices={}), SETTINGS)
    assert line == "final evaluation  0/6 replied  accuracy - -> -  up 0 B  down 0 B  2.1 s"


def test_plain_lines_are_ascii():
    assert plain_line(record_of(), SETTINGS).isascii()


@pytest.mark.parametrize(
    ("values", "bars"), [([], ""), ([0.5], "▁"), ([0.2, 0.2], "▁▁"), ([0, 7, 3, 1], "▁█▄▂"), ([1, 0], "█▁")]
)
def test_sparkline_spans_least_to_greatest(values, bars):
    assert sparkline(values) == bars


@pytest.mark.parametrize("stage", ["waiting", "training", "evaluating", "finished"])
@pytest.mark.parametrize("width", [80, 100, 150, 160])
@pytest.mark.parametrize("num_devices", [0, 6, 300])
def test_the_view_fits_the_screen(num_devices, width, stage):
    lines = shown(snapshot(num_devices, stage=stage), width)
    assert len(lines) < 24
    assert max(map(len, lines)) <= width


def test_a_very_low_screen_still_shows_a_device():
    assert sum(line.startswith("device-") for line in shown(snapshot(6), height=5)) == 1


def test_the_head_says_how_the_run_stands():
    text = "\n".join(shown(snapshot(attempt=2), width=120))
    for wanted in (
        "plant · fedspu",
        "round 41 of 50, attempt 2  training: 2 of 6 replied (closes with 5), 38 s left",
        "81%",  # 40 rounds and 2 of 5 replies
        "1 min 11 s, about 3 min 05 s left",
        "40.0 → 80.0 %",
        "up 1.2 MB (50.0 %), down 1.0 MB (50.0 %)",
        "2 late, 1 corrupt",
        "cannot reach the broker",
    ):
        assert wanted in text


@pytest.mark.parametrize(("width", "times", "reasons"), [(99, 0, 0), (100, 6, 0), (150, 6, 6)])
def test_where_there_is_room_it_says_what_was_predicted_and_why(width, times, reasons):
    text = "\n".join(shown(snapshot(6), width=width))
    assert text.count("12.1 / 10.0 min") == times
    assert text.count("p = 0.4 would need") >= reasons
    assert ("why this p" in text) == bool(reasons)


def test_the_head_says_what_time_the_round_was_given():
    assert "2 of 6 replied, 38 s left of 57 s" in "\n".join(shown(snapshot(target=6, round_span_s=57.0)))


def test_few_devices_keep_their_places():
    rows = [line.split()[0] for line in shown(snapshot(10), height=40) if line.startswith("device-")]
    assert rows == [f"device-{index:03d}" for index in range(10)]


def test_of_many_devices_the_busy_come_first_and_the_rest_is_counted():
    lines = shown(snapshot(300, problem=""), width=160)
    rows = [line for line in lines if line.startswith("device-")]
    assert len(rows) == 13
    assert all("sending 45 %" in row for row in rows)
    counts = dict.fromkeys(DOINGS, 30) | {"sending": 17}
    rest, _, parts = "".join(lines[-2:]).partition("more: ")
    assert rest.endswith("and 287 ")
    assert {part.strip() for part in parts.split(",")} == {f"{n} {doing}" for doing, n in counts.items()}


def test_hostile_texts_cannot_steer_the_terminal():
    line = DeviceStatus(
        "a\x1b[2J",
        "declined",
        board="[red]b\x1b]0;x\x07",
        declined_reason="\x1b[31mno",
        ratio_reason="\x1b[2J",
    )
    text = "\n".join(shown(snapshot(devices=(line,), problem="\x1b[1mx"), width=160))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]b" in text


def test_a_status_says_what_every_device_does():
    activities = {"busy": Activity("training", 0.6), "idle": Activity("receiving", 0.1)}
    devices = StatusReader(SETTINGS, PARAMETERS).devices(training_state(), ledger(), activities)
    assert {line.device: line.doing for line in devices} == {
        "away": "away",
        "busy": "training",
        "declines": "declined",
        "done": "replied",
        "idle": "ready",
        "left": "left",
        "refuses": "refused",
    }
    lines = {line.device: line for line in devices}
    assert lines["busy"].progress == 0.6
    assert lines["idle"].progress is None
    assert lines["declines"].reason == "too hot"
    assert lines["refuses"].reason == "too little memory"
    assert (lines["busy"].bytes_up, lines["busy"].bytes_down, lines["busy"].ratio) == (1000, 3000, 0.4)


def test_a_device_that_is_awaited_and_tells_nothing_works():
    devices = StatusReader(SETTINGS, PARAMETERS).devices(training_state(), ledger())
    assert {line.device: line.doing for line in devices}["busy"] == "working"


def test_a_status_counts_the_round_and_the_bytes():
    shot = StatusReader(SETTINGS, PARAMETERS).status(training_state(), ledger(), 130.0)
    assert (shot.round, shot.rounds, shot.attempt, shot.asked, shot.replied) == (3, 30, 2, 4, 1)
    assert (shot.round_left_s, shot.elapsed_s) == (30.0, 30.0)
    assert (shot.bytes_up, shot.bytes_down) == (2000, 3000)
    assert (shot.dense_up, shot.dense_down) == (4 * PARAMETERS * 3, 4 * PARAMETERS * 4)
    assert shot.remaining_s is None


def test_a_status_remembers_the_closed_rounds():
    reader = StatusReader(SETTINGS, PARAMETERS)
    reader.add(record_of(1, closed_s=10.0, devices={"busy": reply(0.1, 0.2), "done": reply(0.3, 0.4)}))
    reader.add(record_of(2, closed_s=20.0, devices={"busy": reply(0.5, 0.6)}))
    reader.add(record_of(3, closed_s=25.0, final_evaluation=True, devices={"done": reply(0.7, 0.8)}))
    shot = reader.status(training_state(), ledger(), 124.0)
    assert [point.number for point in shot.scores] == [1, 2]
    assert shot.scores[0].before == pytest.approx(0.2)
    assert shot.scores[0].after == pytest.approx(0.3)
    lines = {line.device: line for line in reader.devices(training_state(), ledger())}
    assert (lines["busy"].after, lines["done"].after, lines["idle"].after) == (0.6, 0.8, None)
    # rounds 3..30 and the final evaluation, ten seconds each, of which four have passed
    assert shot.remaining_s == pytest.approx(29 * 10 - 4)


def test_a_status_says_what_a_device_expects_then_what_its_last_round_took():
    reader = StatusReader(SETTINGS, PARAMETERS)
    report = DeviceReport("busy", reason="as wanted", round_s=14.0)
    state = EngineState(members={"busy": Member(report=report, ready=True)})
    (line,) = reader.devices(state, ledger())
    assert (line.ratio_reason, line.predicted_s, line.actual_s) == ("as wanted", 14.0, None)
    predicted, actual = RoundCost(None, None, 1.0, 2.0, 3.0), RoundCost(None, None, 2.0, 3.0, 4.0)
    late = msgspec.structs.replace(reply(predicted=predicted), actual=actual)
    reader.add(record_of(1, devices={"busy": late}))
    (line,) = reader.devices(state, ledger())
    assert (line.predicted_s, line.actual_s) == (6.0, 9.0)


@pytest.mark.parametrize(("minimise", "given_s"), [("none", None), ("time", 57.0)])
def test_a_status_tells_a_proposed_deadline(minimise, given_s):
    settings = msgspec.structs.replace(SETTINGS, objective=ObjectiveSection(minimise))
    state = dataclasses.replace(training_state(), timing=Timing(until=160.0, span_s=57.0))
    assert StatusReader(settings, PARAMETERS).status(state, ledger(), 130.0).round_span_s == given_s
    waiting = dataclasses.replace(state, stage="waiting")
    assert StatusReader(settings, PARAMETERS).status(waiting, ledger(), 130.0).round_span_s is None


def test_nothing_is_left_of_a_finished_run():
    reader = StatusReader(SETTINGS, PARAMETERS)
    reader.add(record_of(1, closed_s=10.0))
    books = ledger()
    books.ended_at = 150.0
    shot = reader.status(EngineState(stage="finished", rounds_done=30), books, 999.0)
    assert (shot.remaining_s, shot.round_left_s, shot.elapsed_s) == (None, None, 50.0)
    assert shown((shot, ()))[1] == "finished  after round 1"


def test_before_anybody_came():
    shot = StatusReader(SETTINGS, PARAMETERS).status(EngineState(), Ledger(), 5.0)
    lines = shown((shot, ()))
    assert lines[1] == "round 1 of 30  waiting for devices: 0 there, needs 4"
    assert lines[-1] == "no device yet"


def test_an_open_run_has_no_last_round_and_says_what_it_waits_for():
    shot = snapshot(
        rounds=None, stage="waiting", scheduled="due 2026-11-23 02:00, in 5 h 12 min", remaining_s=None
    )
    lines = shown(shot)
    assert lines[1].rstrip() == "round 41  due 2026-11-23 02:00, in 5 h 12 min"
    assert not any("%" in line and "of" in line and "━" in line for line in lines), "no bar towards an end"
    settings = msgspec.structs.replace(SETTINGS, run=msgspec.structs.replace(SETTINGS.run, rounds="open"))
    assert plain_line(record_of(), settings).startswith("round 12  6/6 replied")


def test_a_status_of_an_open_run_knows_of_no_end_and_keeps_what_it_shows():
    settings = msgspec.structs.replace(SETTINGS, run=msgspec.structs.replace(SETTINGS.run, rounds="open"))
    reader = StatusReader(settings, PARAMETERS)
    for number in range(1, 400):
        reader.add(record_of(number))
    shot = reader.status(EngineState(), Ledger(), 0.0)
    assert (shot.rounds, shot.remaining_s, shot.scheduled) == (None, None, "")
    assert len(shot.scores) == 100
    assert shot.scores[-1].number == 399
    paused = reader.status(EngineState(paused=True), Ledger(), 0.0)
    assert paused.scheduled == "paused: no round opens until edge-coordinator resume"
