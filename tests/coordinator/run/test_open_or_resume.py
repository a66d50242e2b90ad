"""Opening a run's folder: with other settings, with more rounds, after a first start that failed."""

import dataclasses
from contextlib import closing

import pytest
from msgspec.structs import replace
from tests.fleet.test_semi_asynchronous import Desk
from tests.fleet.test_semi_asynchronous import settings as desk_settings
from tests.helpers.errors import raises

from fleetune.coordinator.rounds.events import DeviceReady, Tick
from fleetune.coordinator.run.changed_settings import CHANGEABLE, going_on
from fleetune.coordinator.run.enrolment import Beginning, prepare
from fleetune.coordinator.run.open_or_resume import open_run
from fleetune.coordinator.run.run_events import Notice, ReplyDropped
from fleetune.coordinator.run.stored_run import look_at, mark_finished
from fleetune.protocols.errors import FleetuneError, SettingError
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.settings.encoding import EncodingSection
from fleetune.protocols.settings.objective import ObjectiveSection
from fleetune.protocols.settings.simulation import FleetSection
from fleetune.protocols.wire.messages import TransferKey

ROUND = {"start_with": 4, "deadline_s": 1000.0}


def with_rounds(settings, rounds):
    return replace(settings, run=replace(settings.run, rounds=rounds))


def with_start(settings, number):
    return replace(settings, round=replace(settings.round, start_with=number))


def played(folder, *, rounds=4, restart=False, **round_):
    desk = Desk(folder, with_rounds(desk_settings(**{**ROUND, **round_}), rounds), restart=restart).play()
    mark_finished(desk.run)
    desk.run.store.close()
    return desk


def go_on(desk, settings):
    """Its devices come back to the run with these settings and play it to its end."""
    desk.settings, desk.tasks, desk.closed = settings, {}, []
    desk.run = open_run(settings, desk.folder, durable=False)
    assert desk.run.resumed
    desk.take(desk.run.controller.resume(desk.now))
    desk.play()
    desk.run.store.close()
    return desk


@pytest.mark.parametrize("round_", [{}, {"mode": "buffer", "buffer": 2}])
def test_a_finished_run_goes_on_when_its_rounds_are_raised_and_again(tmp_path, round_):
    desk = played(tmp_path / "run", **round_)
    first = [record for record in desk.closed if not record.final_evaluation]
    name = desk.run.enrolment.run
    for rounds in (6, 7):
        go_on(desk, with_rounds(desk.settings, rounds))
        assert desk.run.enrolment.run == name
        with look_at(desk.folder) as run:
            records = run.controller.records()
            assert run.settings.run.rounds == rounds
            assert run.controller.engine_state.ending.reason == "all rounds are done"
            assert run.controller.ledger.ended_at is not None
            updates = sum(traffic.updates for traffic in run.controller.ledger.traffic.values())
        assert [record.number for record in records] == list(range(1, rounds + 2))
        assert [record.final_evaluation for record in records] == [False] * rounds + [True]
        assert records[: len(first)] == first
        assert all(record.devices for record in records)
        assert updates == sum(len(record.devices) for record in records[:-1])
        with closing(open_run(with_rounds(desk.settings, rounds + 1), desk.folder, durable=False).store):
            pass  # raised, but nobody came
        desk.settings = with_rounds(desk.settings, rounds + 1)


def test_rounds_are_raised_in_the_midst_of_a_run_and_in_its_final_evaluation(tmp_path):
    desk = Desk(tmp_path / "run", with_rounds(desk_settings(**ROUND), 2), restart=False)
    for device in desk.DEVICES:
        desk.take(desk.run.controller.handle(DeviceReady(DeviceReport(device, num_samples=10)), 0.0))
    desk.now = 1.0
    while desk.run.controller.engine_state.stage != "evaluating":
        for device in [name for name in desk.DEVICES if name in desk.tasks]:
            reply = desk.reply(device, desk.tasks.pop(device))
            desk.take(desk.receive(device, reply, desk.now))
    desk.run.store.close()
    go_on(desk, with_rounds(desk.settings, 5))
    with look_at(desk.folder) as run:
        assert [record.number for record in run.controller.records()] == [1, 2, 3, 4, 5, 6]


def test_a_late_answer_to_the_final_evaluation_counts_for_nothing_in_the_round_that_came_instead(tmp_path):
    desk = played(tmp_path / "run", rounds=2)
    run = open_run(with_rounds(desk.settings, 3), desk.folder, durable=False)
    run.controller.resume(50.0)
    assert run.controller.engine_state.round_attempt == (3, 2)
    for device in desk.DEVICES:
        run.controller.handle(DeviceReady(DeviceReport(device, num_samples=10)), 51.0)
    state = run.controller.engine_state
    assert state.stage == "training"
    answer = TransferKey("update", run.enrolment.run, 3, 1, final_evaluation=True)
    (dropped,) = run.controller.note_refused_offer("a", answer, "nobody waits for it", 52.0)
    assert dropped == ReplyDropped("a", 3, 1, "stale")
    assert state.replied == ()
    assert state.counters["stale"] == 1
    run.store.close()


def test_a_finished_run_with_as_many_rounds_is_left_as_it_is(tmp_path):
    desk = played(tmp_path / "run")
    for rounds in (4, 3):
        with pytest.raises(SettingError, match="holds a finished run: raise run"):
            open_run(with_rounds(desk.settings, rounds), desk.folder, durable=False)
    with look_at(desk.folder) as run:
        assert run.controller.finished is not None
        assert run.settings.run.rounds == 4


def test_rounds_are_never_fewer_than_are_closed(tmp_path):
    desk = played(tmp_path / "run", rounds=4)
    open_run(with_rounds(desk.settings, 9), desk.folder, durable=False).store.close()
    with raises(SettingError, "run.rounds = 3", str(desk.folder), "4 rounds"):
        open_run(with_rounds(desk.settings, 3), desk.folder, durable=False)
    open_run(with_rounds(desk.settings, 5), desk.folder, durable=False).store.close()


def test_what_only_the_coordinator_looks_at_may_change_in_a_run_and_nothing_else(tmp_path, caplog):
    desk = played(tmp_path / "run", rounds=2)
    settings = with_rounds(desk.settings, 9)
    free = {
        "participants": 2,
        "over_selection": 2.0,
        "quorum": 2,
        "start_with": 2,
        "prefer": "oort",
        "deadline_slack": 2.0,
        "max_share": 0.5,
        "robust": "median",
        "max_hostile": 0.1,
        "quarantine": 3,
    }
    schedule = {"every": "24h", "window": "01:00-05:00", "zone": "UTC", "new_samples": 3}
    schedule |= {"devices": 2, "drift": True, "first_rounds": 1}
    others = {f"schedule.{key}" for key in schedule} | {"run.rounds", "run.fleet", "objective.at_most"}
    assert {f"round.{key}" for key in free} | others == set(CHANGEABLE)
    settings = replace(settings, objective=ObjectiveSection(at_most=0.5))
    for key, value in schedule.items():
        settings = replace(settings, schedule=replace(settings.schedule, **{key: value}))
        open_run(settings, desk.folder, durable=False).store.close()
        assert f"schedule.{key} was " in caplog.text
    for key, value in free.items():
        settings = replace(settings, round=replace(settings.round, **{key: value}))
        open_run(settings, desk.folder, durable=False).store.close()
        assert f"round.{key} was " in caplog.text
    for section, key, value in [
        ("run", "seed", 3),
        ("run", "final_evaluation", False),
        ("round", "deadline_s", 5.0),
        ("round", "staleness_power", 1.0),
        ("training", "epochs", 7),
        ("model", "weights", "other.safetensors"),
    ]:
        changed = replace(settings, **{section: replace(getattr(settings, section), **{key: value})})
        with pytest.raises(SettingError, match=f"{section}.{key} was .* and is .* now; put that back"):
            open_run(changed, desk.folder, durable=False)
    with look_at(desk.folder) as run:
        assert run.settings == settings


def test_a_run_that_nobody_joined_begins_anew_with_other_settings(tmp_path):
    settings = desk_settings(**ROUND)
    first = open_run(settings, tmp_path / "run", durable=False)
    first.store.close()
    same = open_run(settings, tmp_path / "run", durable=False)
    same.store.close()
    assert same.enrolment.run == first.enrolment.run
    changed = replace(settings, training=replace(settings.training, epochs=7))
    other = open_run(changed, tmp_path / "run", durable=False)
    assert other.enrolment.run != first.enrolment.run
    assert other.enrolment.training.epochs == 7
    assert not other.resumed
    other.controller.handle(DeviceReady(DeviceReport("a", num_samples=10)), 0.0)
    other.store.close()
    with pytest.raises(SettingError, match="epochs was 7"):
        open_run(settings, tmp_path / "run", durable=False)


def test_what_cannot_begin_leaves_nothing_and_takes_nothing_away(tmp_path):
    desk = played(tmp_path / "run")
    before = (tmp_path / "run" / "state.sqlite").read_bytes()
    wrong = replace(desk.settings, model=replace(desk.settings.model, name="no.module:here"))
    with pytest.raises(FleetuneError):
        open_run(wrong, tmp_path / "new", durable=False)
    assert not (tmp_path / "new").exists()
    with pytest.raises(FleetuneError):
        open_run(wrong, tmp_path / "run", fresh=True, durable=False)
    assert (tmp_path / "run" / "state.sqlite").read_bytes() == before
    open_run(desk.settings, tmp_path / "new", durable=False).store.close()


def beta_of(run):
    """As the engine's method, the devices' enrolment and the stored settings have it."""
    with look_at(run.folder) as stored:
        assert stored.settings.method == stored.enrolment.method == run.enrolment.method
    assert run.settings.method["beta"] == run.method.beta == run.enrolment.method["beta"]
    return run.method.beta


def joined(settings, folder, **options):
    """A run that a device has joined: it is begun, whatever its settings become."""
    run = open_run(settings, folder, durable=False, **options)
    run.controller.handle(DeviceReady(DeviceReport("a", num_samples=10)), 0.0)
    run.store.close()
    return run


@pytest.mark.parametrize("method", ["fedpurin", "fedcac"])
def test_what_a_method_takes_from_the_run_is_settled_when_the_run_begins_and_stays(tmp_path, method):
    settings, folder = desk_settings(method, **ROUND), tmp_path / "run"
    assert beta_of(joined(with_rounds(settings, 5), folder)) == 3
    for rounds, said in ((20, {}), (21, {"beta": 3}), (22, {})):
        asked = replace(settings, method={**settings.method, **said})
        run = open_run(with_rounds(asked, rounds), folder, durable=False)
        run.store.close()
        assert run.resumed
        assert beta_of(run) == 3
    other = replace(settings, method={**settings.method, "beta": 10})
    with pytest.raises(SettingError, match=r"method\.beta was 3 and is 10 now; put that back"):
        open_run(with_rounds(other, 23), folder, durable=False)


@pytest.mark.parametrize("method", ["fedpurin", "fedcac"])
def test_a_beta_that_is_said_wins_and_a_run_that_nobody_joined_takes_the_new_rounds(tmp_path, method):
    settings = desk_settings(method, **ROUND)
    said = replace(settings, method={**settings.method, "beta": 7})
    run = open_run(said, tmp_path / "said", durable=False)
    assert beta_of(run) == 7
    run.store.close()
    for rounds, half in ((20, 10), (9, 5), (1, 1)):
        run = open_run(with_rounds(settings, rounds), tmp_path / "run", durable=False)
        assert beta_of(run) == half
        run.store.close()


@pytest.mark.parametrize("method", ["fedpurin", "fedcac"])
def test_a_run_that_began_without_a_beta_of_its_own_goes_on_with_the_100_of_its_release(tmp_path, method):
    settings = desk_settings(method, **ROUND)
    earlier = dataclasses.replace(prepare(with_rounds(settings, 5), tmp_path), method=settings.method)
    assert joined(with_rounds(settings, 5), tmp_path / "run", beginning=Beginning(earlier)).method.beta == 100
    run = open_run(with_rounds(settings, 6), tmp_path / "run", durable=False)
    run.store.close()
    assert run.resumed
    assert run.method.beta == 100


def test_a_run_for_few_bytes_says_little_around_them_unless_it_is_told_otherwise():
    for minimise, compact in {"bytes": True, "time": False, "none": False}.items():
        assert with_objective(minimise).compact is compact
        assert with_objective(minimise, compact=not compact).compact is not compact
    assert not with_objective("bytes", fleet=FleetSection(ratios=(0.2,))).compact
    earlier, wish = with_objective("bytes", compact=False), with_objective("bytes", compact=True)
    assert going_on(earlier, wish) == wish  # to be refused


def test_masks_are_quick_where_time_counts_unless_the_run_says_otherwise():
    for minimise, quick in {"time": True, "energy": True, "bytes": False, "none": False}.items():
        assert with_objective(minimise).quick_masks is quick
        assert with_objective(minimise, quick_masks=not quick).quick_masks is not quick
    assert not with_objective("time", fleet=FleetSection(ratios=(0.2,))).quick_masks
    report = DeviceReport("d", samples_per_s=100.0, uplink_bps=1e5)
    for one, known in {"time": True, "bytes": False}.items():
        told = prepare(with_objective(one)).mask_time(report, "up")
        assert (told is not None) == known
    assert prepare(with_objective("time")).mask_time(report, "down") is None, "nobody knows that link"


def test_comparing_mixtures_takes_less_where_time_counts_unless_the_run_says_otherwise():
    def decided(minimise, **said):
        return prepare(with_objective(minimise, method={"name": "srp-pfed", **said})).method

    for minimise, share in {"time": 0.2, "energy": 0.2, "bytes": None, "none": None}.items():
        assert decided(minimise).get("loss_share") == share
        assert decided(minimise, loss_share=0.5)["loss_share"] == 0.5
    begun = with_objective("time", method=decided("time"))
    assert going_on(begun, with_objective("time", method={"name": "srp-pfed"})) == begun
    of_before = replace(
        begun, method={key: value for key, value in begun.method.items() if key != "loss_share"}
    )
    assert "loss_share" not in going_on(of_before, with_objective("time", method={"name": "srp-pfed"})).method


def with_objective(minimise, compact=None, quick_masks=None, **sections):
    objective = ObjectiveSection(minimise=minimise)
    encoding = EncodingSection(up="int8", compact=compact, quick_masks=quick_masks)
    return replace(desk_settings(), objective=objective, encoding=encoding, **sections)


def test_round_one_that_opens_with_few_devices_says_so_in_one_line(tmp_path):
    run = open_run(with_start(desk_settings(), None), tmp_path / "run", durable=False)
    with closing(run.store):
        report = DeviceReport("a", num_samples=10)
        assert run.controller.handle(DeviceReady(report), 0.0) == []
        said = [one for one in run.controller.handle(Tick(), 60.0) if isinstance(one, Notice)]
        assert [one.line.partition(";")[0] for one in said] == [
            "round 1 opens with 1 of 2 devices, because 60 s have passed since the first one joined"
        ]
