"""A run on data that grow: each round on what is there, the same one on the same, and what is told of it."""

import shutil
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
from sklearn.datasets import load_digits
from tests.edge_agent.run.test_joining import LINK, enrolment

from fleetune.edge_agent.budget.board_meter import BoardMeter
from fleetune.edge_agent.run import first_ratio, memory_room, run_backend
from fleetune.edge_agent.run.device import Device, DeviceSettings
from fleetune.edge_agent.run.enrolling import SAMPLES_AGAIN_S, Enrolling
from fleetune.edge_agent.run.jobs import Joined
from fleetune.edge_agent.run.joining import join
from fleetune.edge_agent.run.round_planner import REPORT_SAMPLES_S
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.edge_agent.state.state_folder import agent_files
from fleetune.edge_agent.stream import Intake
from fleetune.edge_agent.stream.sample_stream import StreamSettings, TooFewSamples, open_stream
from fleetune.protocols.errors import TrainingStopped
from fleetune.protocols.method.averaging import Task
from fleetune.protocols.update import codec
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Everything
from fleetune.protocols.wire.messages import Decline, TransferKey
from fleetune.protocols.wire.payloads import Assignment, Reply

ENROLLED = enrolment(
    run={"name": "r", "seed": 5}, method={"name": "fedavg"}, data={"validation_fraction": 0.1},
    training={"epochs": 2, "batch_size": 16},
)  # fmt: skip


@pytest.fixture(autouse=True)
def small_process(monkeypatch):
    """A process that has run a thousand tests holds more than a board has."""
    for module in (first_ratio, memory_room, run_backend):
        monkeypatch.setattr(module, "process_memory", lambda: SimpleNamespace(resident=250_000_000))


def digits(start, stop):
    found = load_digits()
    x = (found.images[start:stop] / 16)[:, None].astype(np.float32)
    return list(
        zip(x, found.target[start:stop], (f"n{number}" for number in range(start, stop)), strict=True)
    )


class Playing:
    """An agent's life in a folder, without its threads; `tired` is asked before every batch."""

    def __init__(self, folder, tired=lambda: None, enrolled=ENROLLED):
        self.enrolled = enrolled
        store = AgentStore(folder)
        self.lock = store.claim()
        self.stream = open_stream(store.samples, "intake:", StreamSettings())
        self.intake = Intake(self.stream.store)
        settings = DeviceSettings(fleet="f", device="d", data="intake:", state=folder)
        self.device = Device(settings, store, BoardMeter(folder / "none"), None, lambda: LINK, self.stream)
        self.tired, self.now = tired, 0.0

    def join(self):
        data, begun = codec.encode(self.enrolled, self.enrolled.spec), []

        def stop():
            return self.tired() if begun else None  # joining measures how fast training is

        run = self.enrolled.run
        self.joined = join(self.device, run, data, kind="torch", stop=stop, progress=lambda _: None)
        self.joined._clock = lambda: self.now
        begun.append(True)
        return self

    def work(self, number):
        """The reply to a round's task."""
        spec = self.enrolled.spec
        task = Task(Patch.of(self.enrolled.weights, Everything(), spec))
        payload = codec.encode(Assignment("d", number, 1, False, task), spec)
        self.joined.begin(TransferKey("task", self.enrolled.run, number, 1), payload, None)
        return self.joined.work(lambda: payload)

    def close(self):
        self.stream.close()
        self.lock.close()


@pytest.fixture
def playing(tmp_path):
    found = Playing(tmp_path / "state")
    yield found
    found.close()


def measures(reply):
    return codec.decode(reply, Reply, ENROLLED.spec).measures


def test_each_round_trains_on_what_is_there_and_tests_on_what_it_never_trained_on(playing):
    playing.intake.add_many(digits(0, 100))
    playing.join()
    assert playing.joined.session is None  # no samples are in memory between rounds
    first = measures(playing.work(1))
    playing.intake.add_many(digits(100, 300))
    second = measures(playing.work(2))
    assert playing.joined.session is None
    assert first.num_samples < second.num_samples < 300
    assert first.num_test < second.num_test
    assert first.num_samples + first.num_test < 100 < second.num_samples + second.num_test


def test_a_round_that_was_cut_short_is_done_on_the_same_samples_again(tmp_path):
    first = Playing(tmp_path / "state")
    first.intake.add_many(digits(0, 120))
    first.join()
    first.work(1)
    first.intake.add_many(digits(120, 180))
    first.close()
    shutil.copytree(tmp_path / "state", tmp_path / "undisturbed")
    undisturbed = Playing(tmp_path / "undisturbed").join()
    wanted = undisturbed.work(2)
    undisturbed.close()

    steps = iter([None, None, None, "killed"])
    struck = Playing(tmp_path / "state", tired=lambda: next(steps)).join()
    with pytest.raises(TrainingStopped):
        struck.work(2)
    struck.close()
    again = Playing(tmp_path / "state")
    again.intake.add_many(digits(180, 300))
    again.intake.label_many([(f"n{number}", 3) for number in range(0, 180, 7)])
    again.join()
    assert again.work(2) == wanted
    following = measures(again.work(3))
    assert following.num_samples > measures(wanted).num_samples
    again.close()
    (found,) = agent_files(tmp_path / "state")
    assert found.foreign == ()  # a wipe knows the samples as ours


def test_what_is_new_is_told_when_it_is_news_and_a_reply_claims_no_more_than_was_told(playing):
    playing.intake.add_many(digits(0, 100))
    joined = playing.join().joined
    joined.note_samples()
    report = joined.planner.tell()
    assert report.num_samples == report.new_samples > 50
    playing.intake.add_many(digits(100, 108))
    assert not joined.note_samples()
    reply = measures(playing.work(1))
    assert joined.note_samples(replied=True)
    told = joined.planner.tell()
    assert told.num_samples == reply.num_samples > report.num_samples
    assert told.new_samples == 0
    assert not joined.note_samples()
    playing.intake.add_many(digits(108, 112))
    assert joined.note_samples()  # of none there are some
    before = joined.planner.tell()
    playing.intake.add_many(digits(200, 400))
    assert joined.note_samples()
    assert joined.planner.report.new_samples > before.new_samples
    playing.intake.add_many(digits(400, 402))
    joined.planner.tell()
    playing.intake.add_many(digits(402, 412))
    assert not joined.note_samples()
    playing.now += REPORT_SAMPLES_S
    assert joined.note_samples()  # a small change is told in the end


def test_drift_is_told(playing):
    playing.intake.add_many(digits(0, 400))
    joined = playing.join().joined
    playing.work(1)
    joined.note_samples(replied=True)
    joined.planner.tell()
    playing.intake.add_many([(1 - x, y, None) for x, y, _ in digits(400, 600)])
    assert joined.note_samples()
    assert joined.planner.tell().drift >= 1


def test_a_higher_loss_is_told_though_inputs_are_as_they_were(playing):
    found = digits(0, 1500)
    order = np.random.default_rng(0).permutation(len(found))
    found = [found[place] for place in order]
    playing.intake.add_many(found[:700])
    joined = playing.join().joined
    assert not joined.loss_is_due()
    playing.work(1)
    assert not joined.loss_is_due()
    playing.intake.add_many(found[700:1000])
    assert joined.loss_is_due()
    joined.test_loss()
    assert playing.stream.store.drift.loss < 1
    assert not joined.loss_is_due()
    joined.test_loss()  # asked twice it is done once
    playing.intake.add_many([(x, (y + 1) % 10, name) for x, y, name in found[1000:1300]])
    assert joined.loss_is_due()
    joined.test_loss()
    drift = playing.stream.store.drift
    assert drift.inputs < 1 <= drift.loss
    assert joined.note_samples()
    assert joined.planner.tell().drift == drift.loss
    playing.work(2)
    assert playing.stream.store.drift.loss is None


def test_from_now_on_what_does_not_fit_the_model_is_refused(playing):
    playing.intake.add_many(digits(0, 60))
    playing.intake.add(np.zeros((3, 3)), 1)  # before a run is known any shape is kept
    playing.join()
    assert playing.intake.add(np.ones((3, 3)), 1) == "refused"
    assert playing.intake.add(np.ones((1, 8, 8)), 10) == "refused"
    assert playing.intake.add(np.ones((8, 8)), 9) == "stored"
    assert measures(playing.work(1)).num_samples > 30


def test_a_run_is_joined_as_soon_as_there_are_samples(playing, monkeypatch):
    jobs, playing.now = [], 0.0
    agent_jobs = SimpleNamespace(join=lambda run, do: jobs.append((run, do)), progress=None, closing=False)
    object.__setattr__(playing.device, "guard", SimpleNamespace(reason_not_to_train=lambda: None))
    playing.device.store.enrolment(ENROLLED.run).write(codec.encode(ENROLLED, ENROLLED.spec))
    monkeypatch.setattr("fleetune.edge_agent.run.enrolling.needs_bundle", lambda _: False)
    enrolling = Enrolling(playing.device, agent_jobs)

    def come_to():
        future = Future()
        future.set_exception(TooFewSamples("intake:: no samples yet"))
        return enrolling.joined(Joined(ENROLLED.run, future), 0.0)

    assert enrolling.enrol(ENROLLED.run, 0.0) is None
    assert len(jobs) == 1
    declined = come_to()
    assert isinstance(declined, Decline)
    assert "no samples yet" in declined.reason
    assert enrolling.tick(SAMPLES_AGAIN_S - 1) is None
    assert len(jobs) == 1
    assert enrolling.tick(SAMPLES_AGAIN_S) is None
    assert len(jobs) == 2
    assert come_to() is None  # said once
    with pytest.raises(TooFewSamples, match=r"at least one sample to train on and one to test on$"):
        playing.join()
    playing.intake.add_many([(x, None, name) for x, _, name in digits(0, 50)])
    with pytest.raises(TooFewSamples, match="some samples have no label yet"):
        playing.join()
    playing.intake.label_many([(name, y) for _, y, name in digits(0, 50)])
    assert playing.join().joined.report.num_samples > 20


TASKS = {
    "regression": (2, lambda y: [y / 10, 1.0], 3),
    "multi-label": (2, lambda y: [y % 2, y > 4], [1.0, 2.0]),
    "reconstruction": (64, lambda y: None if y % 2 else 0, 2),
}


@pytest.mark.parametrize("kind", TASKS)
def test_labels_are_as_the_task_takes_them_and_a_wrong_one_stops_no_round(tmp_path, kind):
    num_outputs, label, wrong = TASKS[kind]
    enrolled = enrolment(
        run={"name": "r"}, method={"name": "fedavg"}, task={"kind": kind}, data={"validation_fraction": 0.1},
        model={"name": "mlp", "input_shape": [1, 8, 8], "num_classes": num_outputs},
    )  # fmt: skip
    playing = Playing(tmp_path, enrolled=enrolled)
    playing.intake.add_many([(x, label(int(y)), name) for x, y, name in digits(0, 90)])
    assert playing.intake.add(np.full((8, 8), 0.5), wrong) == "stored"  # no run says yet what a label is
    playing.join()
    assert playing.intake.add(np.full((8, 8), 0.25), wrong) == "refused"
    found = codec.decode(playing.work(1), Reply, enrolled.spec).measures
    assert found.num_samples + found.num_test <= 90
    assert found.num_samples > 40
    playing.close()
