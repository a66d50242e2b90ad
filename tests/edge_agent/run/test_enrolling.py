"""Between an enrolment and the first task: which trainer, which bundle, and whether yet."""

import importlib.metadata
import importlib.util
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from tests.helpers.errors import raises

from fleetune.coordinator.run.enrolment import prepare
from fleetune.coordinator.serving.bundle_server import BundleMade, BundleServer
from fleetune.edge_agent.budget.owner_policy import Policy
from fleetune.edge_agent.run import enrolling
from fleetune.edge_agent.run.device import Device, DeviceSettings
from fleetune.edge_agent.run.enrolling import AGAIN_S, MOST_ARRIVALS, Enrolling
from fleetune.edge_agent.run.intake import Intake
from fleetune.edge_agent.run.jobs import Joined
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.edge_agent.training import trainers
from fleetune.edge_agent.training.trainers import Trainers, check_room
from fleetune.protocols.bundle.shipped import shipped_bundle
from fleetune.protocols.errors import ModelError, SettingError, TrainingStopped
from fleetune.protocols.settings.run_toml import parse_run
from fleetune.protocols.update import codec
from fleetune.protocols.wire.messages import Ack, Decline, Fetch, Offer, Refuse, Resume, TransferKey
from fleetune.protocols.wire.transfer import Chunk, digest_of, transfer_id

ENROLMENT = prepare(
    parse_run(
        {
            "run": {"name": "r"},
            "model": {"name": "mlp", "input_shape": [1, 8, 8], "num_classes": 10},
            "method": {"name": "fedspu"},
        }
    )
)
RUN = ENROLMENT.run
BUNDLE = shipped_bundle("mlp", (1, 8, 8), 10).encoded()


def install(monkeypatch, *names):
    """As where these packages are installed."""
    found = {"torch", "onnxruntime"} & set(names)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in found else None)
    packages = [SimpleNamespace(metadata={"Name": name}) for name in names]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: packages)


@pytest.fixture
def device(tmp_path, monkeypatch):
    """A device with ONNX Runtime, which knows the run."""
    install(monkeypatch, "onnxruntime")
    found = SimpleNamespace(store=AgentStore(tmp_path), jobs=[], now=0.0, reason_not_to_train=None)
    found.store.enrolment(RUN).write(codec.encode(ENROLMENT, ENROLMENT.spec))
    found.agent_jobs = jobs = SimpleNamespace(
        join=lambda run, do: found.jobs.append((run, do)), progress=None, closing=False
    )
    guard = SimpleNamespace(reason_not_to_train=lambda: found.reason_not_to_train)
    settings = DeviceSettings("f", "d", "digits", tmp_path, policy=Policy(ratio=0.6))
    found.enrolling = Enrolling(Device(settings, found.store, None, guard), jobs)
    found.intake = Intake(
        "d", found.store, joined=lambda: None, reason_not_to_train=lambda: None, clock=lambda: found.now
    )
    return found


def again_on(device):
    """The intake of the agent's next start."""
    return Intake("d", device.store, joined=lambda: None, reason_not_to_train=lambda: None, clock=lambda: 0.0)


def offer_of(payload, run=RUN, transfer_key=None):
    transfer_key, digest = transfer_key or TransferKey("bundle", run), digest_of(payload)
    return Offer(transfer_id(transfer_key, "d", digest), digest, len(payload), transfer_key)


def receive(intake, payload, offer=None):
    offer = offer or offer_of(payload)
    intake.handle_offer(offer)
    arrived = intake.handle_chunk(Chunk(offer.transfer, 0, payload).encode(), 0.0)
    assert intake.keep(arrived) is None
    assert intake.accept(arrived) == Ack(offer.transfer, len(payload))


def test_the_lightest_that_is_installed_trains(monkeypatch):
    install(monkeypatch, "torch", "onnxruntime")
    assert Trainers().kind(RUN) == "onnx"
    assert Trainers("torch").kind(RUN) == "torch"
    install(monkeypatch, "torch")
    assert Trainers().kind(RUN) == "torch"
    install(monkeypatch, "onnxruntime", "onnxruntime-training-cpu")
    assert trainers.installed() == ("onnx", "ort-training")


def test_without_a_bundle_torch_takes_over_where_the_owner_left_the_choice(monkeypatch):
    install(monkeypatch, "torch", "onnxruntime")
    lacking = {RUN: "block uses aten.sort"}
    assert Trainers("auto", lacking).kind(RUN) == "torch"
    assert Trainers("auto", lacking).kind("another") == "onnx"
    with pytest.raises(ModelError, match="; torch can train it"):
        Trainers("onnx", lacking).kind(RUN)
    install(monkeypatch, "onnxruntime")
    with pytest.raises(ModelError, match="torch can train it"):
        Trainers("auto", lacking).kind(RUN)


@pytest.mark.parametrize(
    ("choice", "packages", "error", "remedy"),
    [
        ("auto", (), ModelError, "pip install onnxruntime"),
        ("torch", ("onnxruntime",), ModelError, "pip install torch"),
        ("ort-training", ("onnxruntime",), ModelError, "onnxruntime-training-cpu"),
        ("tensorflow", ("torch",), SettingError, "auto, onnx, torch, ort-training"),
    ],
)
def test_a_choice_that_cannot_be_is_one_line(monkeypatch, choice, packages, error, remedy):
    install(monkeypatch, *packages)
    with raises(error, remedy=remedy):
        Trainers(choice)


def test_a_trainer_without_room_is_not_even_imported(monkeypatch):
    monkeypatch.delitem(trainers.sys.modules, "torch", raising=False)
    with raises(ModelError, "torch", "60 MB", "150 MB", remedy=("--trainer onnx", "MemoryMax")):
        check_room("torch", 150_000_000, 60_000_000)
    check_room("torch", None, 60_000_000)


def test_the_bundle_is_asked_for_and_then_the_run_is_joined(device):
    assert device.enrolling.enrol(RUN, 0.0) == Fetch(RUN)
    assert device.jobs == []
    receive(device.intake, BUNDLE)
    assert device.enrolling.enrol(RUN, 1.0) is None
    assert [run for run, _ in device.jobs] == [RUN]
    assert device.enrolling.enrol(RUN, 2.0) is None
    assert len(device.jobs) == 1


def test_a_bundle_that_comes_and_is_never_here_is_not_asked_for_for_ever(device):
    key, answers = TransferKey("bundle", RUN), []
    for _ in range(MOST_ARRIVALS + 1):
        answers.append(device.enrolling.enrol(RUN, 0.0))
        device.enrolling.note_arrived(key)  # the disk says that it is stored, and has nothing
    *asked, given_up = answers
    assert asked == [Fetch(RUN)] * MOST_ARRIVALS
    assert isinstance(given_up, Decline)
    assert given_up.reason == "the bundle came 3 times and cannot be read back: check the disk"
    assert device.enrolling.enrol(RUN, 1.0) == Fetch(RUN), "when it is enrolled again it tries anew"


def test_the_same_bundle_serves_the_next_run_without_travelling(device):
    receive(device.intake, BUNDLE)
    device.store.enrolment("next").write(b"x")
    offer = offer_of(BUNDLE, "next")
    assert device.intake.handle_offer(offer) == Ack(offer.transfer, len(BUNDLE))
    assert device.store.bundle("next") == BUNDLE
    assert len([*(device.store.folder / "bundles").iterdir()]) == 1


def test_what_was_taken_and_is_gone_from_the_disk_is_taken_again(device):
    task = TransferKey("task", RUN, 1, 1)
    newer, older, enrolment = (
        offer_of(b"newer", transfer_key=task),
        offer_of(b"older", transfer_key=task),
        offer_of(b"new", transfer_key=TransferKey("enrolment", RUN)),
    )
    intake = Intake(
        "d", device.store, joined=lambda: RUN, reason_not_to_train=lambda: None, clock=lambda: 0.0
    )
    for offer, payload in [(older, b"older"), (newer, b"newer"), (enrolment, b"new")]:
        receive(intake, payload, offer)
        assert intake.handle_offer(offer) == Ack(offer.transfer, len(payload))
    assert intake.handle_offer(older) == Ack(older.transfer, 5)  # overtaken, not lost
    device.store.forget_tasks(RUN)
    device.store.enrolment(RUN).write(b"other")
    for offer in (newer, older, enrolment):
        assert intake.handle_offer(offer) == Resume(offer.transfer, 0)


@pytest.mark.parametrize("intake_of", [lambda device: device.intake, again_on])
def test_a_bundle_that_was_damaged_on_disk_is_fetched_again(device, intake_of):
    receive(device.intake, BUNDLE)
    (path,) = (device.store.folder / "bundles").iterdir()
    path.write_bytes(BUNDLE[:-1] + b"x")
    assert device.store.bundle(RUN) is None
    assert device.enrolling.enrol(RUN, 0.0) == Fetch(RUN)
    offer = offer_of(BUNDLE)
    assert intake_of(device).handle_offer(offer) == Resume(offer.transfer, 0)
    receive(intake_of(device), BUNDLE)
    assert device.store.bundle(RUN) == BUNDLE


def test_a_name_in_place_of_a_digest_leads_nowhere(device):
    (device.store.folder / "runs" / RUN / "bundle").write_text("../../../etc/passwd")
    assert device.store.bundle(RUN) is None


def test_a_bundle_of_a_run_that_nobody_knows_is_refused(device):
    answer = device.intake.handle_offer(offer_of(BUNDLE, "stranger"))
    assert isinstance(answer, Refuse)
    assert "knows no run" in answer.reason


def test_a_run_without_a_bundle_is_declined_with_the_reason(device, caplog):
    device.enrolling.enrol(RUN, 0.0)
    declined = device.enrolling.do_without_bundle(RUN, "block2 uses aten.sort", 1.0)
    assert (declined.run, declined.round) == (RUN, 0)
    assert declined.reason.startswith("block2 uses aten.sort; torch can train it")
    assert f"cannot join run {RUN}: declined" in caplog.text
    assert device.enrolling.do_without_bundle("unknown", "whatever", 2.0) is None


def test_what_the_owner_forbids_is_postponed_and_tried_again(device):
    device.reason_not_to_train = "on battery power"
    assert device.enrolling.enrol(RUN, 0.0) == Decline(RUN, 0, 0, "on battery power")
    assert device.enrolling.enrol(RUN, 1.0) is None  # said already
    assert device.enrolling.wake_at == 1.0 + AGAIN_S
    device.reason_not_to_train = None
    assert device.enrolling.tick(AGAIN_S) is None
    assert device.enrolling.tick(1.0 + AGAIN_S) == Fetch(RUN)
    assert device.enrolling.wake_at is None


@pytest.mark.parametrize(("assigned_ratio", "wanted"), [(0.4, 0.4), (0.8, 0.6), (None, 0.6)])
def test_a_dealt_ratio_is_the_most_that_the_policy_of_the_run_allows(
    device, monkeypatch, assigned_ratio, wanted
):
    policies = []
    monkeypatch.setattr(enrolling, "join", lambda device, *_, **__: policies.append(device.settings.policy))
    device.enrolling.note_assigned(RUN, assigned_ratio)
    device.enrolling.note_assigned("another", 0.1)
    receive(device.intake, BUNDLE)
    device.enrolling.enrol(RUN, 0.0)
    device.jobs[0][1]()
    assert [policy.ratio for policy in policies] == [wanted]


def test_the_trainer_that_was_chosen_is_the_one_that_joins(device, monkeypatch):
    calls = []
    monkeypatch.setattr(enrolling, "join", lambda *args, **kwargs: calls.append((args[1], kwargs["kind"])))
    receive(device.intake, BUNDLE)
    device.enrolling.enrol(RUN, 0.0)
    device.jobs[0][1]()
    assert calls == [(RUN, "onnx")]


def test_training_of_a_run_stops_when_it_is_over_or_the_owner_objects_or_the_agent_ends(device, monkeypatch):
    asked = []
    monkeypatch.setattr(enrolling, "join", lambda *_, stop, **__: asked.append(stop))
    receive(device.intake, BUNDLE)
    device.enrolling.enrol(RUN, 0.0)
    device.jobs[0][1]()
    (why,) = asked
    assert why() is None
    device.reason_not_to_train = "too hot"
    assert why() == "too hot"
    device.enrolling.finish(RUN)
    assert why() == "the run is finished"
    device.reason_not_to_train = None
    device.enrolling.finish("another")
    assert why() is None
    device.enrolling.finish(RUN)
    device.enrolling.enrol(RUN, 1.0)  # it goes on after all
    assert why() is None
    device.agent_jobs.closing = True
    assert why() == "the agent stops"


def test_what_joining_came_to_counts_only_while_it_is_waited_for(device):
    receive(device.intake, BUNDLE)

    def outcome(problem, run=RUN):
        device.enrolling.enrol(RUN, 0.0)
        ended = Future()
        ended.set_exception(problem)
        return device.enrolling.joined(Joined(run, ended), 5.0)

    assert outcome(ModelError("no room"), "another") is None
    assert outcome(ModelError("no room")) == Decline(RUN, 0, 0, "no room")
    device.enrolling.enrol(RUN, 0.0)
    device.enrolling.finish(RUN)
    over = Future()
    over.set_exception(TrainingStopped("the run is finished"))
    assert device.enrolling.joined(Joined(RUN, over), 5.0) is None
    assert outcome(TrainingStopped("hot")) == Decline(RUN, 0, 0, "hot")


# The coordinator's side


@pytest.fixture
def desk(tmp_path):
    from fleetune.coordinator.run.open_or_resume import open_run

    content = {
        "run": {"name": "r"},
        "model": {"name": "mlp", "input_shape": [1, 9, 9], "num_classes": 3},
        "method": {"name": "fedavg"},
    }
    run, events, said = open_run(parse_run(content), tmp_path / "r"), [], []
    yield SimpleNamespace(
        run=run, events=events, said=said, desk=BundleServer(run, events.append, said.append)
    )
    run.store.close()


def wait_for_the_bundle(desk):
    for thread in threading.enumerate():
        if thread.name == "bundle":
            thread.join()
    (event,) = desk.events
    return event


def test_the_bundle_is_made_once_and_kept(desk):
    assert desk.desk.ask("a") is None
    assert desk.desk.ask("b") is None
    event = wait_for_the_bundle(desk)
    assert desk.desk.made(event) == {"a", "b"}
    assert desk.desk.ask("c") == event
    assert BundleServer(desk.run, desk.events.append, desk.said.append).ask("c") == event
    assert "is made for devices without torch" in desk.said[0]
    assert f"{len(event.payload):,} bytes" in desk.said[1]


def test_why_there_is_none_is_told_to_all(desk, monkeypatch):
    from fleetune.coordinator.serving import bundle_server

    def fail(*_):
        raise ModelError("block uses aten.sort")

    monkeypatch.setattr(bundle_server, "in_child_process", fail)
    desk.desk.ask("a")
    event = wait_for_the_bundle(desk)
    assert event == BundleMade(None, "block uses aten.sort")
    assert desk.desk.made(event) == {"a"}
    assert desk.desk.ask("b") == event
