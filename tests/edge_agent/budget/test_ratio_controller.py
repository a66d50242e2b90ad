"""What a device can afford, round after round; the run it takes part in; the owner's policy, watched."""

import io
import re
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import rich.console
from msgspec import UNSET, structs
from tests.helpers.played_run import enrolment, settings
from tests.helpers.world import CAPABILITY, CHOICES, World

from fleetune.edge_agent.budget.board_meter import BoardMeter
from fleetune.edge_agent.budget.explain import explanation
from fleetune.edge_agent.budget.owner_policy import Policy
from fleetune.edge_agent.budget.policy_guard import FRESH_S, PolicyGuard
from fleetune.edge_agent.budget.ratio_controller import RatioController, read_ratio_controller
from fleetune.edge_agent.run.joined_run import JoinedRun
from fleetune.edge_agent.run.round_planner import RoundPlanner
from fleetune.edge_agent.run.session import WorkDone
from fleetune.firmware_profiles import load
from fleetune.protocols.conditions import Conditions
from fleetune.protocols.errors import StoreError, TrainingStopped
from fleetune.protocols.method.choice import Budget, DeviceReport
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.update.masks.coding_time import FLOPS_PER_BOOLEAN, CodingTime
from fleetune.protocols.wire.messages import TransferKey

FIRST = TransferKey("task", "run", 1, 1)
FINAL_EVALUATION = TransferKey("task", "run", 2, 1, final_evaluation=True)
UNKNOWN = Conditions()


def a_ratio_controller(deadline_s=20.0, **policy):
    report = DeviceReport("d", num_samples=CAPABILITY.num_samples)
    board = load("raspberry-pi-4b")
    return RatioController(CHOICES, CAPABILITY, board, Policy(**policy), deadline_s, report).chosen(UNKNOWN)


def taught(ratio_controller, world, rounds=5):
    rng = np.random.default_rng(0)
    for _ in range(rounds):
        ratio = ratio_controller.report.ratio or CHOICES[0].ratio
        choice = next(one for one in CHOICES if one.ratio == ratio)
        ratio_controller = ratio_controller.learned(Budget(ratio), world.round(choice, rng)).chosen(UNKNOWN)
    return ratio_controller


def test_what_rounds_took_lowers_the_ratio_and_the_coordinator_hears_of_it():
    before = a_ratio_controller()
    after = taught(before, World())
    assert 0 < after.report.ratio < before.report.ratio
    assert after.predicted.round_s <= 20
    assert after.report.round_s == after.predicted.round_s
    assert after.is_news(before.report)
    assert not after.is_news(after.report)
    assert not structs.replace(
        after, report=replace(after.report, round_s=1.05 * after.report.round_s)
    ).is_news(after.report)
    assert structs.replace(after, report=replace(after.report, round_s=1.2 * after.report.round_s)).is_news(
        after.report
    )


def test_where_nothing_fits_it_declines_until_it_has_forgotten():
    broken = taught(a_ratio_controller(), World(samples_per_s=0.5))
    assert not broken.fits
    assert broken.report.reason.startswith("nothing fits: 0.1 would need ")
    for _ in range(10):
        broken = broken.declining().chosen(UNKNOWN)
    assert broken.fits


def test_a_choice_made_elsewhere_is_kept_whatever_it_takes():
    fixed = structs.replace(a_ratio_controller(ratio=0.6), deadline_s=None).chosen(UNKNOWN)
    assert taught(fixed, World(samples_per_s=0.5)).report.ratio == 0.6


def test_it_is_remembered_as_it_was_and_damage_only_costs_what_was_learned():
    known = taught(a_ratio_controller(max_celsius=40), World())
    again = read_ratio_controller(known.encoded())
    assert again.report == known.report
    assert again.cost_history == known.cost_history
    assert again.explained(UNKNOWN) == known.explained(UNKNOWN)
    assert read_ratio_controller(None) is None
    assert read_ratio_controller(known.encoded()[:-3]) is None
    assert read_ratio_controller(b"\xc1 not msgpack") is None


def test_a_ratio_controller_of_an_unknown_trainer_or_another_format_is_forgotten():
    known = taught(a_ratio_controller(), World())
    written = msgspec.msgpack.decode(known.encoded())
    assert read_ratio_controller(msgspec.msgpack.encode(written)) == known
    without_model = {key: value for key, value in written["capability"].items() if key != "model"}
    for capability in ({**written["capability"], "trainer": "abacus"}, without_model):
        assert read_ratio_controller(msgspec.msgpack.encode({**written, "capability": capability})) is None


def test_the_explanation_shows_every_ratio_its_limits_and_why():
    known = taught(a_ratio_controller(max_celsius=40), World())
    console = rich.console.Console(width=120, file=io.StringIO())
    console.print(explanation(known, Conditions(memory_bytes=500_000_000, celsius=50)))
    shown = console.file.getvalue()
    rows = [line for line in shown.splitlines() if re.match(r"\s*(0\.\d|1) ", line)]
    assert len(rows) == len(CHOICES)
    assert "of 20 s" in shown
    assert "of 450 MB" in shown
    assert known.report.reason in " ".join(shown.split())
    assert rows[-1].rstrip().endswith("no: time")
    assert rows[0].rstrip().endswith("yes")
    assert "corrected by 5 past rounds" in shown
    assert "the device does not train now: max_celsius: 50.0 °C, at most 40 °C" in shown


@pytest.mark.parametrize("thin", [1.0, 1e-3, 1e5])
def test_the_explanation_fits_into_80_characters(thin):
    """Also of a slow link, a large model and a thin battery."""
    known = a_ratio_controller(max_battery_percent_per_hour=0.5)
    link = replace(known.capability.link, uplink_bps=thin * 1.1e6)
    known = structs.replace(known, capability=replace(known.capability, link=link, base_bytes=10**9))
    console = rich.console.Console(width=80, file=io.StringIO())
    console.print(explanation(known, Conditions(memory_bytes=64 * 10**9, power="battery", battery=0.5)))
    table, _, _ = console.file.getvalue().partition("p = ")
    assert "…" not in table
    assert max(map(len, table.splitlines())) <= 80
    rows = [line.split() for line in table.splitlines() if re.match(r"\s*(0\.\d|1) ", line)]
    assert [row[0] for row in rows] == [f"{choice.ratio:g}" for choice in known.choices]
    assert all(len(row) in (10, 11) for row in rows)


class SomeSession:
    """Answers at once, or not at all."""

    last_round = base = None
    num_samples = 1
    most_steps = 14

    def __init__(self, problem=None):
        self.problem, self.budgets = problem, []

    def reply(self, data, budget, enough, mask_time):
        self.mask_time = mask_time
        self.budgets.append(budget)
        steps = next((step for step in range(1, self.most_steps) if enough()), self.most_steps)
        self.done = WorkDone(budget.local_work * steps / self.most_steps)
        if self.problem:
            raise self.problem
        return data + b" answered"


class SomeMeter(BoardMeter):
    """Of a board with 260 MB at its peak, that draws 10 J a round."""

    running = False
    now = UNKNOWN
    peak_bytes = 260_000_000

    def conditions(self):
        return self.now

    def start(self):
        self.running = True

    def stop(self):
        was, self.running = self.running, False
        return 10.0 if was else None


class SomeMemory:
    """One value; None: the disk is full."""

    def __init__(self):
        self.data = b""

    def read(self):
        return self.data

    def write(self, data):
        if self.data is None:
            raise StoreError("no space left")
        self.data = data


def take_part(session=None, ratio_controller=None, **asked):
    clock, processor = iter(range(1000)), iter(range(1000))
    return JoinedRun(
        replace(enrolment(settings("fedavg", "synchronous")), **asked),
        session or SomeSession(),
        RoundPlanner(ratio_controller or a_ratio_controller()),
        SomeMeter(),
        SomeMemory(),
        clock=lambda: float(7 * next(clock)),
        processor=lambda: float(2 * next(processor)),
    )


def play(joined, transfer_key=FIRST, download_s=0.5, upload_s=2.0):
    joined.begin(transfer_key, bytes(100), download_s)
    joined.work(lambda: b"task")
    joined.delivered(upload_s)


def test_a_round_is_measured_predicted_and_learned_from():
    joined = take_part()
    expected = joined.planner.ratio_controller.predicted
    play(joined)
    assert joined.expected == expected
    assert joined.taken == RoundCost(
        bytes_down=100,
        bytes_up=len(b"task answered"),
        download_s=0.5,
        train_s=7.0,
        upload_s=2.0,
        memory_bytes=260_000_000,
        joules=10.0,
        processor_s=2.0,
    )
    (lesson,) = joined.planner.ratio_controller.cost_history.past_rounds
    slight = {"bytes_down": None, "download_s": None}  # a first task of hardly any bytes
    assert lesson.actual == structs.replace(joined.taken, **slight)
    assert read_ratio_controller(joined._memory.data).cost_history.past_rounds == (lesson,)


@pytest.mark.parametrize("quick_masks", [True, False])
def test_masks_are_written_by_what_the_device_tells_of_itself_where_the_run_has_quick_ones(quick_masks):
    session, known = SomeSession(), a_ratio_controller()
    told = replace(known.report, samples_per_s=70.0, uplink_bps=8e5)
    play(take_part(session, structs.replace(known, report=told), quick_masks=quick_masks))
    wanted = CodingTime(booleans_per_s=70.0 * 1e3 / FLOPS_PER_BOOLEAN, bytes_per_s=1e5)
    assert session.mask_time == (wanted if quick_masks else None)


def late_controller(least_work=0.25):
    """All of the local training would take till after the deadline: it takes 7 s a step, not 0.3 s."""
    return structs.replace(a_ratio_controller(deadline_s=50.0), least_work=least_work)


def test_who_would_be_late_sends_what_it_has_at_the_deadline():
    joined = take_part(ratio_controller=late_controller())
    play(joined, download_s=2.0)
    steps = round(joined.session.done.local_work * 14)
    assert 1 < steps < 14
    assert 2.0 + 7.0 * steps <= 50.0 < 2.0 + 7.0 * (steps + 2)
    assert joined._work.budget == Budget(1.0, steps / 14)
    (lesson,) = joined.planner.ratio_controller.cost_history.past_rounds
    done = joined._work.budget
    whole = joined.planner.ratio_controller.expected(Budget(1.0)).train_s
    part = joined.planner.ratio_controller.expected(done).train_s
    assert part == pytest.approx(lesson.actual.train_s), "it learned what its steps take"
    assert whole > part


def test_who_is_told_how_long_its_round_is_given_keeps_to_that():
    joined = take_part(ratio_controller=late_controller())
    joined.begin(FIRST, bytes(100), 2.0)
    joined._work = replace(joined._work, span_s=30.0)
    joined.work(lambda: b"task")
    assert 2.0 + 7.0 * round(joined.session.done.local_work * 14) <= 30.0
    controller, budget = joined.planner.ratio_controller, joined._work.budget
    assert controller.trains_until_s(budget, 2.0, 1e9) == controller.trains_until_s(budget, 2.0)
    assert controller.trains_until_s(budget, 2.0, 0.1) == 0.0


def test_without_an_objective_a_late_round_is_done_whole():
    joined = take_part(ratio_controller=late_controller(least_work=1.0))
    play(joined, download_s=2.0)
    assert joined.session.done.local_work == 1.0


def test_a_final_evaluation_teaches_nothing():
    joined = take_part()
    play(joined, FINAL_EVALUATION)
    assert joined.planner.ratio_controller.cost_history.past_rounds == ()
    assert not joined._meter.running


def test_the_budget_of_the_next_round_follows_what_was_learned():
    session = SomeSession()
    joined = take_part(session)
    for number in range(1, 5):
        play(joined, TransferKey("task", "run", number, 1), upload_s=15.0)
    assert session.budgets[0] == Budget(1.0)
    assert session.budgets[-1].ratio < 1.0
    assert session.budgets[-1] == Budget(session.budgets[-1].ratio)


def test_a_late_word_about_another_round_is_not_this_ones():
    joined = take_part()
    joined.begin(TransferKey("task", "run", 2, 1), bytes(100), None)
    assert joined.is_at(TransferKey("update", "run", 2, 1))
    assert not joined.is_at(TransferKey("update", "run", 1, 1))
    assert not joined.is_at(TransferKey("update", "other", 2, 1))
    assert not take_part().is_at(TransferKey("update", "run", 1, 1))


def test_work_that_was_stopped_leaves_no_meter_running():
    joined = take_part(SomeSession(TrainingStopped("hot")))
    joined.begin(FIRST, bytes(100), 0.5)
    with pytest.raises(TrainingStopped):
        joined.work(lambda: b"task")
    assert not joined._meter.running
    assert joined.planner.ratio_controller.cost_history.past_rounds == ()


def test_a_full_disk_does_not_stop_a_round():
    joined = take_part()
    joined._memory.data = None
    play(joined)
    assert len(joined.planner.ratio_controller.cost_history.past_rounds) == 1


def test_the_coordinator_hears_the_first_report_and_then_what_changed():
    joined = take_part()
    planner = joined.planner
    assert planner.is_news
    assert planner.tell() == joined.report
    assert not planner.is_news


def test_the_guard_asks_the_sensors_now_and_then_and_says_why_not():
    meter, now = SomeMeter(), [0.0]
    guard = PolicyGuard(Policy(charging_only=True), load("phone-mid"), meter, clock=lambda: now[0])
    assert guard.is_on
    meter.now = Conditions(power="charging")
    assert guard.reason_not_to_train() is None
    meter.now = Conditions(power="battery", battery=0.4)
    assert guard.reason_not_to_train() is None  # asked a moment ago
    now[0] += FRESH_S
    assert guard.reason_not_to_train().startswith("charging_only: the board runs on battery")


def test_heat_must_fall_well_below_its_limit_before_it_goes_on():
    meter, now = SomeMeter(), [0.0]
    guard = PolicyGuard(Policy(max_celsius=60), load("phone-mid"), meter, clock=lambda: now[0])
    seen = []
    for celsius in (59, 61, 58, 54):
        meter.now, now[0] = Conditions(celsius=celsius), now[0] + FRESH_S
        seen.append(guard.reason_not_to_train() is None)
    assert seen == [True, False, False, True]


def test_without_conditions_that_come_and_go_no_sensor_is_asked():
    meter = SomeMeter()
    meter.conditions = pytest.fail
    guard = PolicyGuard(Policy(ratio=0.5, max_memory_mb=300, nice=5), load("phone-mid"), meter)
    assert not guard.is_on
    assert guard.reason_not_to_train() is None


def proposed_to(**fields):
    return structs.replace(a_ratio_controller(**fields), proposed=True).chosen(UNKNOWN)


def test_where_ratios_are_proposed_it_says_what_each_takes_that_fits():
    controller = proposed_to()
    affords = controller.report.affords
    assert [one.ratio for one in affords] == [c.ratio for c in CHOICES if c.ratio <= controller.report.ratio]
    assert affords[-1].round_s == pytest.approx(controller.predicted.round_s, rel=1e-3), "in four digits"
    assert affords[0].joules < affords[-1].joules
    assert affords[0].bytes_up < affords[-1].bytes_up
    assert [one.ratio for one in proposed_to(ratio=0.2).report.affords] == [0.1, 0.2], "its owner's wish"
    assert a_ratio_controller().report.affords is UNSET


def test_where_ratios_are_proposed_it_says_what_its_board_draws_doing_nothing():
    assert proposed_to().report.idle_w == load("raspberry-pi-4b").idle_w
    assert a_ratio_controller().report.idle_w is UNSET
    generic = structs.replace(a_ratio_controller(), proposed=True, board=load("generic"))
    assert generic.chosen(UNKNOWN).report.idle_w is UNSET, "nothing is claimed of it"


def test_it_works_at_what_is_proposed_and_never_at_more_than_it_affords():
    controller = proposed_to(ratio=0.4)
    member = RoundPlanner(controller)
    for proposed, worked in ((0.2, 0.2), (0.35, 0.3), (0.4, 0.4), (1.0, 0.4), (0.01, 0.1), (None, 0.4)):
        work = member.begin(FIRST, 10, 0.1, None if proposed is None else Budget(proposed))
        assert work.budget == Budget(worked)
        told_s = next(one.round_s for one in controller.report.affords if one.ratio == worked)
        assert work.expected.round_s == pytest.approx(told_s, rel=1e-3)


def test_what_less_local_training_takes_is_said_and_learned_from():
    controller = structs.replace(a_ratio_controller(), proposed=True, least_work=0.25).chosen(UNKNOWN)
    (smallest, *_) = controller.report.affords
    choice = Budget(smallest.ratio, 0.5)
    step = 1 / 14  # of them a share is a whole number
    assert controller.expected(choice).round_s == pytest.approx(smallest.seconds(0.5), rel=step)
    assert controller.expected(choice).joules == pytest.approx(smallest.energy(0.5), rel=step)
    work = RoundPlanner(controller).begin(FIRST, 10, 0.1, choice)
    assert work.budget == choice
    taken = controller.expected(choice)
    after = controller.learned(choice, taken).chosen(UNKNOWN)
    assert after.expected(choice).round_s == pytest.approx(taken.round_s)
    whole = controller.expected(Budget(smallest.ratio)).round_s
    assert after.expected(Budget(smallest.ratio)).round_s == pytest.approx(whole)


def test_who_has_room_says_how_much_more_local_training_fits():
    def affords(deadline_s):
        asked = structs.replace(a_ratio_controller(deadline_s), proposed=True, most_work=4.0)
        return asked.chosen(UNKNOWN).report.affords

    assert {one.local_work for one in affords(1000.0)} == {4.0}
    tight = affords(12.0)
    assert {one.local_work for one in tight} == {1.0, 2.0}
    assert all(one.seconds(one.local_work) <= 12.0 for one in tight)


def thinner(controller, *values):
    """With encodings of updates of which the values take so much of the first one's bytes."""
    return structs.replace(controller, proposed=True, values=(1.0, *values))


def test_what_an_update_by_another_encoding_takes_is_told_and_expected():
    controller = thinner(a_ratio_controller(1000.0), 0.1).chosen(UNKNOWN)
    one = next(one for one in controller.report.affords if one.ratio == 0.6)
    assert controller.report.values == (1.0, 0.1)
    thin = controller.expected(Budget(0.6, 1.0, 1))
    assert thin.bytes_up == pytest.approx(one.sent(0.1), abs=2)
    assert thin.round_s == pytest.approx(one.seconds(1.0, 0.1), rel=1e-3)
    assert thin.joules == pytest.approx(one.energy(1.0, 0.1), rel=1e-3)
    assert thin.bytes_up < 0.2 * one.bytes_up
    assert a_ratio_controller(1000.0).report.values is UNSET


def test_what_rounds_by_one_encoding_took_says_nothing_of_the_bytes_of_another():
    controller = thinner(a_ratio_controller(1000.0), 0.1).chosen(UNKNOWN)
    thin, whole = Budget(0.6, 1.0, 1), Budget(0.6)
    expected = controller.expected(thin)
    learned = controller.learned(thin, structs.replace(expected, bytes_up=3 * expected.bytes_up))
    assert learned.expected(thin).bytes_up == 3 * expected.bytes_up
    assert learned.expected(whole).bytes_up == controller.expected(whole).bytes_up


def test_who_cannot_send_a_whole_update_takes_part_with_a_thin_one():
    alone = structs.replace(a_ratio_controller(deadline_s=6.7), proposed=True).chosen(UNKNOWN)
    controller = thinner(a_ratio_controller(deadline_s=6.7), 0.1).chosen(UNKNOWN)
    first = {one.ratio: one.uplink for one in controller.report.affords}
    assert {one.ratio for one in alone.report.affords} == {r for r, uplink in first.items() if uplink == 0}
    assert first[1.0] == 1
    work = RoundPlanner(controller).begin(FIRST, 10, 0.1, Budget(1.0))
    assert work.budget == Budget(1.0, 1.0, 1), "no more than it affords"
    forged = RoundPlanner(controller).begin(FIRST, 10, 0.1, Budget(1.0, 1.0, 8))
    assert forged.budget == Budget(1.0, 1.0, 1)
    assert not a_ratio_controller(deadline_s=4.8).fits
    short = thinner(a_ratio_controller(deadline_s=4.8), 0.1).chosen(UNKNOWN)
    assert "it fits with a smaller encoding of its values" in short.report.reason
    assert short.fits


def test_who_cannot_do_all_of_the_local_training_takes_part_with_a_share_of_it():
    too_short = structs.replace(a_ratio_controller(deadline_s=4.0), proposed=True)
    assert not too_short.chosen(UNKNOWN).fits
    controller = structs.replace(too_short, least_work=0.25).chosen(UNKNOWN)
    assert controller.fits
    assert all(one.local_work < 1 for one in controller.report.affords)
    assert "% of local training" in controller.report.reason
    assert controller.report.round_s <= 4.0
    assert controller.report.ratio == controller.report.affords[0].ratio
    for ratio in (0.1, 0.3, 1.0):
        work = RoundPlanner(controller).begin(FIRST, 10, 0.1, Budget(ratio, 1.0))
        assert work.expected.round_s <= 4.0, "it does no more than it affords, whatever is proposed"
    assert not structs.replace(controller, deadline_s=0.5).chosen(UNKNOWN).fits


def test_other_ratios_that_fit_and_other_seconds_are_news():
    controller = proposed_to()
    report = controller.report

    def news(affords):
        return structs.replace(controller, report=replace(report, affords=affords)).is_news(report)

    assert not news(report.affords)
    assert news(report.affords[1:])
    assert news(tuple(structs.replace(one, round_s=1.2 * one.round_s) for one in report.affords))
    assert not news(tuple(structs.replace(one, round_s=1.05 * one.round_s) for one in report.affords))
