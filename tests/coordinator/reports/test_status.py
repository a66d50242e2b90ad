"""Looking at a run: its status, rounds.jsonl as rounds close, and who is missing."""

import fcntl
import io
import json
import threading
from contextlib import closing

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console
from tests.coordinator.reports.test_live import record_of, reply, training_state
from tests.fleet.test_semi_asynchronous import Desk
from tests.fleet.test_semi_asynchronous import settings as desk_settings

from fleetune.coordinator.metrics.summary import SUMMARY
from fleetune.coordinator.queries.waiting import (
    PATIENCE_S,
    REPEAT_S,
    Impatience,
    abandoned_line,
    missing_from,
    waiting_reason,
)
from fleetune.coordinator.reports.status import follow, show_status
from fleetune.coordinator.rounds.engine_state import EngineState, Member, RoundAttempt, Timing
from fleetune.coordinator.rounds.events import DeviceGone, DeviceReady, Tick
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.coordinator.run.round_journal import ROUNDS, RoundJournal
from fleetune.coordinator.run.run_events import RoundAbandoned, RoundClosed
from fleetune.coordinator.run.stored_run import FINISHED, look_at
from fleetune.coordinator.serving.console_output import finish, report_run
from fleetune.coordinator.store.folder_lock import claim
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.settings.round import RoundSection


def lines_in(folder):
    return [json.loads(line) for line in (folder / ROUNDS).read_text().splitlines()]


@pytest.fixture
def desk(tmp_path):
    """A run of 8 rounds with four devices, played to its end, still held by its coordinator."""
    desk = Desk(tmp_path / "run", desk_settings(start_with=4, deadline_s=1000.0), restart=False).play()
    with closing(desk.run.store):
        yield desk


def shown(action, width=100):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    action(console)
    return console.file.getvalue()


def test_interrupted_in_its_report_a_run_leaves_what_scripts_read_and_is_not_over(desk, monkeypatch):
    def interrupted(draw):
        raise KeyboardInterrupt

    def ended(console):
        finish(desk.run, "all rounds are done", console)

    with monkeypatch.context() as patch:
        patch.setattr("fleetune.coordinator.reports.report.write_page", interrupted)
        assert "stopped in its report; the same command writes it" in shown(ended)
    folder = desk.run.folder
    assert json.loads((folder / SUMMARY).read_text())["rounds"] == 8
    assert len(lines_in(folder)) == 9, "with the final evaluation"
    assert not (folder / "report.html").exists()
    assert desk.run.store.get(FINISHED) is None
    assert "report.html" in shown(ended)
    assert (folder / "report.html").exists()
    assert desk.run.store.get(FINISHED) is not None


def test_a_line_a_round_as_rounds_close_and_none_twice_after_a_crash(tmp_path):
    records = [record_of(number) for number in (1, 2, 3)]
    closed = []
    journal = RoundJournal(tmp_path, lambda: closed)
    assert not (tmp_path / ROUNDS).exists()
    for record in records:
        closed.append(record)
        journal.observe(RoundClosed(record))
        assert lines_in(tmp_path)[-1]["number"] == record.number
    with (tmp_path / ROUNDS).open("ab") as file:
        file.write(b'{"number": 4, "cut sho')  # a crash in the midst of a line
    again = RoundJournal(tmp_path, lambda: closed)
    assert [line["number"] for line in lines_in(tmp_path)] == [1, 2, 3]
    closed.append(record_of(4))
    again.observe(RoundClosed(closed[-1]))
    whole = (tmp_path / ROUNDS).read_bytes()
    assert [msgspec.json.decode(line, type=RoundRecord) for line in whole.splitlines()] == closed


def test_a_round_that_was_taken_back_keeps_no_line(tmp_path):
    closed = []
    journal = RoundJournal(tmp_path, lambda: closed)
    for number, attempt in [(1, 1), (2, 1), (2, 2), (3, 1)]:
        closed = [record for record in closed if record.number < number]
        closed.append(record_of(number, attempt=attempt))
        journal.observe(RoundClosed(closed[-1]))
    assert [(line["number"], line["attempt"]) for line in lines_in(tmp_path)] == [(1, 1), (2, 2), (3, 1)]


def test_a_disk_that_was_full_costs_the_journal_no_line(tmp_path, monkeypatch, caplog):
    closed = [record_of(1)]
    journal = RoundJournal(tmp_path, lambda: closed)

    def full(path, data):
        with path.open("ab") as file:
            file.write(data[:20])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fleetune.protocols.disk.DISK.append", full)
    closed.append(record_of(2))
    journal.observe(RoundClosed(closed[-1]))
    monkeypatch.undo()
    assert "No space left" in caplog.text
    closed.append(record_of(3))
    journal.observe(RoundClosed(closed[-1]))
    assert [line["number"] for line in lines_in(tmp_path)] == [1, 2, 3]


def test_who_waits_for_whom_is_named_with_the_reason():
    round_ = RoundSection(quorum=1, start_with=2)
    assert (
        waiting_reason(training_state(), round_)
        == "round 3 waits for away (away), busy (working); 1 of 4 replied"
    )
    some = RoundSection(participants=2, over_selection=2.0)
    assert waiting_reason(training_state(), some).endswith("1 of 4 replied, closes with 2")
    members = {"a": Member(DeviceReport("a"), ready=True), "b": Member(DeviceReport("b"))}
    waiting = EngineState(members=members)
    wanted = "round 1 waits for devices: 1 there, needs 2; b (away)"
    assert waiting_reason(waiting, RoundSection(start_with=2)) == wanted
    assert waiting_reason(EngineState(stage="finished"), round_) == ""
    usual = "round 1 waits for devices: 1 there, needs 2, or opens with fewer 60 s after the first came"
    assert (
        waiting_reason(EngineState(members=members, timing=Timing(start_by=60.0)), RoundSection())
        == f"{usual}; b (away)"
    )
    overdue = "round 1 waits for devices: 1 there, needs 3; b (away)"
    late = EngineState(members=members, timing=Timing(start_by=60.0, seen_at=61.0))
    assert waiting_reason(late, RoundSection(quorum=3)) == overdue


def test_a_closed_round_names_who_is_missing_and_why_unless_it_has_all_it_wanted():
    members = {
        "away": Member(DeviceReport("away")),
        "slow": Member(DeviceReport("slow"), ready=True, asked=RoundAttempt(4, 1)),
        "hot": Member(DeviceReport("hot"), ready=True, declined_round=3, declined_reason="41 °C\nof 40"),
    }
    after = EngineState(rounds_done=3, members=members)
    record = replace(record_of(3, devices={}), participants=("away", "hot", "slow"))
    words = missing_from(record, after, RoundSection())
    assert words.startswith("away (away), hot (declined: 41 °C")
    assert words.endswith("of 40), slow (working)")
    assert "\n" not in words
    done = replace(record, devices=dict.fromkeys(record.participants, reply()))
    assert missing_from(done, after, RoundSection()) == ""
    assert missing_from(record, after, RoundSection(mode="window", window_s=1.0)) == ""
    many = replace(record, participants=tuple(f"device-{index:02d}" for index in range(20)))
    assert missing_from(many, after, RoundSection()).endswith("device-04 (gone), 15 more")


def test_an_attempt_that_is_given_up_names_who_was_missing(tmp_path):
    desk = Desk(tmp_path / "run", desk_settings(start_with=4, quorum=3, deadline_s=10.0), restart=False)
    controller = desk.run.controller
    for device in "abcd":
        desk.take(controller.handle(DeviceReady(DeviceReport(device, num_samples=10)), 0.0))
    reply = desk.reply("b", desk.tasks.pop("b"))
    desk.take(desk.receive("b", reply, 1.0))
    controller.handle(DeviceGone("d"), 2.0)
    (event,) = [one for one in controller.handle(Tick(), 11.0) if isinstance(one, RoundAbandoned)]
    wanted = "missing: a (working), c (working), d (away)"
    line = "round 1, attempt 1 is given up: too few replied in time"
    assert abandoned_line(event, controller.engine_state) == f"{line}; {wanted}"
    desk.run.store.close()


def test_a_log_hears_of_a_wait_once_it_lasts_and_again_when_it_changes_or_lasts_on():
    impatience, round_, engine, said = Impatience(), RoundSection(), training_state(), []
    for now in range(0, 4 * int(REPEAT_S), 1):
        if now == 100:
            engine.put("busy", answer="update")
        if word := impatience.line(engine, round_, float(now)):
            said.append((now, word))
    assert [at for at, _ in said][:3] == [int(PATIENCE_S), 100, 100 + int(REPEAT_S)]
    assert "busy (working)" in said[0][1]
    assert "busy" not in said[1][1]
    assert len(said) == 5


def test_a_round_that_goes_on_is_no_wait():
    impatience, engine = Impatience(), training_state()
    for now in range(0, 100, 5):
        engine.change(rounds_done=now)
        assert impatience.line(engine, RoundSection(), float(now)) == ""


def test_status_shows_a_run_that_its_coordinator_holds_and_one_that_was_left(tmp_path):
    desk = Desk(tmp_path / "run", desk_settings(start_with=4, deadline_s=1000.0), restart=False)
    for device in "abcd":
        desk.take(desk.run.controller.handle(DeviceReady(DeviceReport(device, num_samples=10)), 1.0))
    text = shown(lambda console: show_status(desk.folder, console))
    assert "round 1 of" in text
    assert "training: 0 of 4 replied" in text
    assert "round 1 waits for a (working), b (working), c (working), d (working)" in text
    desk.run.store.close()
    text = shown(lambda console: show_status(desk.folder, console))
    assert "no coordinator is at it" in text
    assert "waits for" not in text


def test_following_ends_with_the_run_and_tells_each_round_once(desk):
    paused = []

    def pause(_):
        paused.append(True)
        if len(paused) == 2:
            desk.run.store.close()  # the coordinator ends

    text = shown(lambda console: follow(desk.folder, console, pause))
    assert len(paused) == 2
    assert [text.count(f"round {number}/8 ") for number in range(1, 9)] == [1] * 8
    assert text.count("final evaluation  ") == 1
    assert text.rstrip().endswith("finished: all rounds are done")


def test_the_report_of_a_run_that_goes_on_leaves_its_rounds_to_the_coordinator(desk):
    journal = RoundJournal(desk.folder, desk.run.controller.records)
    with look_at(desk.folder) as run:
        journal.observe(RoundClosed(replace(desk.closed[-1], number=99)))  # between the look and the report
        shown(lambda console: report_run(run, console, live=True))
    assert len(lines_in(desk.folder)) == len(desk.closed) + 1
    with look_at(desk.folder) as run:
        shown(lambda console: report_run(run, console))
    assert len(lines_in(desk.folder)) == len(desk.closed)


def test_a_look_never_keeps_a_coordinator_from_starting(tmp_path):
    """Both may ask for the lock at the same moment."""
    (tmp_path / "lock").touch()
    with (tmp_path / "lock").open("rb") as asking:
        fcntl.flock(asking, fcntl.LOCK_SH | fcntl.LOCK_NB)
        timer = threading.Timer(0.08, asking.close)
        timer.start()
        claim(tmp_path).close()
        timer.join()
