"""Semi-asynchronous runs as a whole: simulated, restarted anywhere, and over MQTT."""

from collections import Counter
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
from tests.conftest import tiny_spec
from tests.helpers.fleet_processes import Fleet, assert_equal, run_toml, wait_until
from tests.helpers.slow_proxy import SlowProxy

from fleetune.coordinator.extensions.staleness import staleness_factor
from fleetune.coordinator.rounds.engine_state import RoundAttempt
from fleetune.coordinator.rounds.events import DeviceReady, Tick
from fleetune.coordinator.run.enrolment import Beginning, prepare
from fleetune.coordinator.run.open_or_resume import open_run
from fleetune.coordinator.run.run_events import RoundClosed
from fleetune.coordinator.store.run_store import RunStore
from fleetune.coordinator.tasks.assignment import OutgoingTask
from fleetune.protocols.errors import SettingError, StoreError
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.method.method import Round
from fleetune.protocols.method.staleness import blend_with
from fleetune.protocols.methods import REGISTRY, create
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.settings.run_toml import parse_run
from fleetune.protocols.update import codec
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.wire.payloads import Assignment, Measures, Reply, run_key
from fleetune.tools.simulator.runner import simulate

ABLE = [
    "fedavg",
    "fedprox",
    "fedper",
    "fedrep",
    "fedbn",
    "lg-fed",
    "ditto",
    "moon",
    "fedspu",
    "srp-pfed",
    "cd2-pfed",
    "perfedmask",
]
MODES = {"window": {"mode": "window", "window_s": 0.02}, "buffer": {"mode": "buffer", "buffer": 3}}


def settings(method="fedavg", rounds=8, fleet=None, **round_):
    return parse_run(
        {
            "run": {"name": "semi", "rounds": rounds},
            "model": {"name": "mlp", "input_shape": [1, 8, 8], "num_classes": 10},
            "method": {"name": method},
            "data": {"source": "digits", "partition": {"kind": "iid", "samples": 60}},
            "training": {"batch_size": 10},
            "encoding": {"up": "raw", "down": "raw"},  # who comes first does not hang on what was learned
            "round": round_,
            "fleet": fleet or {"devices": 6, "boards": {"n100-gateway": 4, "raspberry-pi-zero-2w": 2}},
        }
    )


def play(folder, **options):
    run, _ = simulate(settings(**options), folder, workers=0, fresh=True)
    played = SimpleNamespace(
        records=[record for record in run.controller.records() if not record.final_evaluation],
        ledger=run.controller.ledger,
        weights=run.controller.shared_model.tobytes(),
    )
    run.store.close()
    return played


@pytest.mark.parametrize("mode", MODES)
def test_as_many_aggregations_take_less_time_and_a_slow_device_still_contributes(tmp_path, mode):
    together = play(tmp_path / "synchronous")
    ours = play(tmp_path / mode, **MODES[mode])
    assert len(ours.records) == len(together.records) == 8
    assert ours.records[-1].closed_s < 0.7 * together.records[-1].closed_s
    slow = [record.devices["device-5"] for record in ours.records if "device-5" in record.devices]
    assert slow
    assert max(reply.staleness for reply in slow) > 0
    assert sum(reply.staleness == 0 for record in ours.records for reply in record.devices.values()) > 8
    for before, after in zip(ours.records, ours.records[1:], strict=False):
        assert after.opened_s == before.closed_s


@pytest.mark.parametrize("mode", MODES)
def test_bytes_are_counted_once_for_each_task_and_update(tmp_path, mode):
    ours = play(tmp_path, **MODES[mode])
    for device, traffic in ours.ledger.traffic.items():
        replies = [record.devices[device] for record in ours.records if device in record.devices]
        assert traffic.updates == len(replies)
        assert traffic.up == sum(reply.bytes_up for reply in replies)
        assert traffic.updates <= traffic.tasks <= traffic.updates + 1  # perhaps one that nobody waited for
        assert traffic.down >= sum(reply.bytes_down for reply in replies)
        assert all(reply.bytes_down > 1000 for reply in replies)


@pytest.mark.parametrize("method", ["fedspu", "srp-pfed"])
def test_the_simulation_is_deterministic_by_its_virtual_clock(tmp_path, method):
    first = play(tmp_path / "a", method=method, **MODES["buffer"])
    again = play(tmp_path / "b", method=method, **MODES["buffer"])
    assert first.weights == again.weights
    assert first.records == again.records


def test_the_power_says_what_stale_updates_weigh(tmp_path):
    gentle = play(tmp_path / "a", staleness_power=0.0, **MODES["buffer"])
    strict = play(tmp_path / "b", staleness_power=8.0, **MODES["buffer"])
    assert [record.devices.keys() for record in gentle.records] == [
        record.devices.keys() for record in strict.records
    ]
    assert gentle.weights != strict.weights


def test_devices_that_come_and_go_still_finish_every_aggregation(tmp_path):
    fleet = {"devices": 6, "availability": 0.6, "boards": {"raspberry-pi-zero-2w": 2}}
    ours = play(
        tmp_path, rounds=10, fleet=fleet, participants=3, deadline_s=0.5, max_staleness=3, **MODES["buffer"]
    )
    assert [record.number for record in ours.records] == list(range(1, 11))
    assert all(record.devices for record in ours.records)
    assert all(reply.staleness <= 3 for record in ours.records for reply in record.devices.values())


def test_a_method_that_needs_all_together_is_refused_before_anything_starts(tmp_path):
    run_settings = settings(method="kapc", **MODES["window"])
    for begin in (
        lambda: simulate(run_settings, tmp_path / "a", workers=0, fresh=True),
        lambda: open_run(run_settings, tmp_path / "b"),
    ):
        with pytest.raises(SettingError) as caught:
            begin()
        assert (
            str(caught.value)
            == 'round.mode = "window": kapc needs all updates of a round; use round.mode = "synchronous"'
        )
    assert not (tmp_path / "a").exists()


class Desk:
    """A run whose devices are one line of arithmetic; the coordinator may be killed between two events."""

    DEVICES = ("a", "b", "c", "d")
    PACE = (0, 1, 0, 2, 1, 0, 1, 0, 3, 2, 1, 0)  # whose turn it is to reply: a and b are the fast ones

    def __init__(self, folder, run_settings, *, restart, in_process=False):
        self.folder, self.settings, self.restart = folder, run_settings, restart
        self.enrolment = prepare(run_settings)
        begin = {"durable": False, "in_process": in_process}
        self.run = open_run(run_settings, folder, beginning=Beginning(self.enrolment), **begin)
        self.now, self.tasks, self.closed = 0.0, {}, []

    def play(self, step=0, until_closed=None):
        """From after `step` events, which the store has, to the end, or until so many rounds are closed."""
        self.now = float(step)
        if step:
            self.take(self.run.controller.resume(self.now))
        for device in self.DEVICES:
            self.take(self.run.controller.handle(DeviceReady(DeviceReport(device, num_samples=10)), self.now))
        while self.run.controller.finished is None and len(self.closed) != until_closed:
            self.now += 1.0
            if self.restart:
                self.be_killed()
            device = self.DEVICES[self.PACE[step % len(self.PACE)]]
            step += 1
            if device in self.tasks:
                reply = self.reply(device, self.tasks.pop(device))
                self.take(self.receive(device, reply, self.now))
            else:
                self.take(self.run.controller.handle(Tick(), self.now))
            assert step < 200
        return self

    def be_killed(self):
        self.run.store.close()
        self.run = open_run(self.settings, self.folder, durable=False)
        self.take(self.run.controller.resume(self.now))
        for device in self.DEVICES:
            self.take(self.run.controller.handle(DeviceReady(DeviceReport(device, num_samples=10)), self.now))

    def receive(self, device, data, now):
        """A reply comes in, offered as what it is."""
        reply = codec.decode(data, Reply[self.run.method.update_type], self.enrolment.spec)
        turn = RoundAttempt(reply.round, reply.attempt)
        return self.run.controller.receive(device, turn, data, RoundCost(), now)

    def take(self, outcomes):
        for outcome in outcomes:
            if isinstance(outcome, OutgoingTask):
                self.deliver(outcome.device, outcome.transfer_key, outcome.make())
            elif isinstance(outcome, RoundClosed):
                self.closed.append(outcome.record)

    def deliver(self, device, transfer_key, payload):
        """A task that is sent again is the same, byte for byte."""
        known = self.tasks.get(device)
        if known is not None and self.turn(known) == (transfer_key.round, transfer_key.attempt):
            assert payload == known
        self.tasks[device] = payload
        self.run.controller.note_delivered(device, transfer_key, len(payload))

    def read(self, payload):
        kind = Assignment[self.run.method.task_type]
        return codec.decode(payload, kind, self.enrolment.spec)

    def turn(self, payload):
        assignment = self.read(payload)
        return assignment.round, assignment.attempt

    def reply(self, device, payload):
        assignment, spec = self.read(payload), self.enrolment.spec
        update = None
        if not assignment.final_evaluation:
            weights = assignment.task.patch.apply(np.zeros(spec.size, np.float32), spec)
            update = self.update(weights + np.float32(ord(device[-1]) % 7) * np.float32(0.125))
        reply = Reply(device, *self.turn(payload), False, Measures(10, 0), update)
        return codec.encode(reply, spec)

    def update(self, weights):
        return self.run.method.update(weights, SimpleNamespace(num_samples=10))


@pytest.mark.parametrize("mode", ["window", "buffer"])
def test_a_coordinator_that_is_killed_between_any_two_events_ends_with_the_same_bits(tmp_path, mode):
    round_ = {
        "window": {"mode": "window", "window_s": 2.5},
        "buffer": {"mode": "buffer", "buffer": 2, "max_staleness": 2},
    }[mode]
    round_ = {**round_, "start_with": 4, "deadline_s": 1000.0}
    if mode == "window":
        round_["window_s"] = 1000.0  # restarts begin the window's time anew; here all must have answered
    plain = Desk(tmp_path / "plain", settings(**round_), restart=False).play()
    struck = Desk(tmp_path / "struck", settings(**round_), restart=True).play()
    weights = [desk.run.controller.shared_model.tobytes() for desk in (plain, struck)]
    assert weights[0] == weights[1]
    assert [record.number for record in plain.closed] == list(range(1, 10))
    assert plain.closed == struck.closed
    assert plain.run.controller.ledger == struck.run.controller.ledger
    stalest = max(r.staleness for record in plain.closed[:-1] for r in record.devices.values())
    assert stalest == (0 if mode == "window" else 2)
    for desk in (plain, struck):
        desk.run.store.close()


def test_the_weight_of_a_stale_update():
    assert staleness_factor(0, 0.5) == 1.0
    assert staleness_factor(3, 0.5) == 0.5
    assert staleness_factor(3, 0.0) == 1.0
    assert staleness_factor(1, 1.0) == 0.5


@pytest.mark.parametrize("name", ABLE)
def test_a_discounted_update_moves_the_model_by_its_factor_even_alone(name):
    """What it does not weigh goes to the present model."""
    spec = tiny_spec()
    method = create(name, spec, {})
    assert method.semi_asynchronous
    present = np.linspace(-1, 1, spec.size, dtype=np.float32)
    state = method.init_coordinator(present)
    state = method.admit(state, DeviceReport("d", num_samples=10))
    planned, tasks = method.plan(state, Round(3, ("d",)), run_key(0).child("plan", 3, 1))
    again, _ = method.plan(state, Round(3, ("d", "e")), run_key(0).child("plan", 3, 1))
    assert codec.encode(planned, spec) == codec.encode(again, spec)
    patch = tasks["d"].patch
    moved = Patch(patch.selection, patch.values + np.float32(0.5))
    loss = {"loss": 0.3} if name == "srp-pfed" else {}
    update = method.update_type(patch=moved, num_samples=10, **loss)
    whole = method.shared_model(method.aggregate(planned, [("d", update)])) - present
    quarter = method.shared_model(method.aggregate(planned, [("d", method.discount(planned, update, 0.25))]))
    np.testing.assert_allclose(quarter - present, 0.25 * whole, atol=1e-6)
    assert np.count_nonzero(whole)


def test_blend_with_keeps_what_it_covers():
    spec = tiny_spec()
    method = create("fedper", spec, {})
    zero, one = np.zeros(spec.size, np.float32), np.ones(spec.size, np.float32)
    patch = blend_with(Patch.of(one, method.shared, spec), zero, 0.25, spec)
    patch.check(spec)
    assert set(patch.values.tolist()) == {0.25}


def test_every_method_that_is_not_declared_able_is_refused():
    able = {name for name in REGISTRY if create(name, tiny_spec(), {}).semi_asynchronous}
    assert set(ABLE) <= able
    assert not able & {"kapc", "kapc-bls", "fedpurin", "dc-pfl", "fedamp", "fedcac", "clusterfl", "fjord"}


@pytest.mark.fleet
def test_a_fleet_of_processes_in_buffer_mode_goes_on_after_its_coordinator_is_killed(tmp_path):
    rounds = 8
    toml = run_toml(rounds=rounds, epochs=60, selection='mode = "buffer"\nbuffer = 2')
    with Fleet(tmp_path, toml) as fleet:
        fleet.start()
        fleet.coordinator.wait_for("round 3/8")
        fleet.coordinator.kill()
        fleet.start_coordinator().wait_for("goes on")
        fleet.wait_finished()
        outcome = fleet.outcome()
    closed = [record for record in outcome.rounds if record[0] <= rounds]
    assert [record[0] for record in closed] == list(range(1, rounds + 1))
    counted = Counter(device for record in closed for device in record[3])
    assert counted == {device: traffic[5] for device, traffic in outcome.traffic.items()}
    assert all(1 <= len(record[3]) <= 2 for record in closed)  # 1: nobody else was back after the restart
    for device, traffic in outcome.traffic.items():
        down = sum(record[3][device][0] for record in closed if device in record[3])
        assert traffic[0] >= down
        assert traffic[1] == sum(record[3][device][1] for record in closed if device in record[3])


@pytest.mark.nightly
@pytest.mark.fleet
def test_a_window_of_a_fleet_closes_by_time_also_after_its_coordinator_was_killed_in_it(tmp_path):
    """device-0 is still sending its first update when two windows close; the third one takes it."""
    calm, records = play_windows(tmp_path / "calm", strike=False)
    struck, again = play_windows(tmp_path / "struck", strike=True)
    assert_equal(struck, calm)
    others = {"device-1": 0, "device-2": 0}
    stale = [{**others}, {**others}, {"device-0": 2, **others}, {"device-0": 0, **others}]
    for closed in (records, again):
        found = [{device: reply.staleness for device, reply in one.devices.items()} for one in closed]
        assert found[:4] == stale
        assert closed[4].final_evaluation
    assert calm.traffic["device-0"][4:] == (2, 2)
    assert calm.traffic["device-1"][4:] == (4, 4)


def play_windows(folder, *, strike):
    folder.mkdir()
    window = 'mode = "window"\nwindow_s = 5.0'
    toml = run_toml(
        source="tests.helpers.fleet_processes:images",
        shape="[1, 28, 28]",
        method="fedavg",
        rounds=4,
        selection=window,
    )
    with Fleet(folder, toml) as fleet, SlowProxy(fleet.broker.port, 40_000) as proxy:
        fleet.start_coordinator()
        fleet.start_agent("device-0", port=proxy.port)
        fast = [fleet.start_agent("device-1"), fleet.start_agent("device-2")]
        fleet.coordinator.wait_for("round 1/4")
        if strike:
            strike_in_the_second_window(fleet, fast)
        fleet.coordinator.wait_for("round 2/4")
        proxy.uplink_bps = None
        fleet.wait_finished()
        for agent in fast:
            assert len(agent.lines("round 2: training")) == 1
        # chunks may reach the new coordinator before their transfer is offered to it
        assert set(fleet.summary()["refused"]) <= ({"PacketForeign"} if strike else set())
        with closing(RunStore.open(folder / "runs" / fleet.name / "state.sqlite")) as store:
            records = store.records()
        return fleet.outcome(), records


def strike_in_the_second_window(fleet, fast):
    """When two updates are in and the third is under way."""
    for agent in fast:
        agent.wait_for("round 2: update delivered")
    run = fleet.folder / "runs" / fleet.name
    wait_until(lambda: any((run / "incoming" / "device-0").glob("*.part")), "a part of the slow update is in")
    fleet.coordinator.kill()
    with closing(RunStore.open(run / "state.sqlite")) as store:
        assert store.reply("device-1")
        assert store.reply("device-2")
        with pytest.raises(StoreError, match="reply of device-0 is missing"):
            store.reply("device-0")
    fleet.start_coordinator().wait_for("goes on")
