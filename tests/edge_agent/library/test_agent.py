"""An agent in one's own program, all but its child process: samples, labels, predictions, what stands."""

import asyncio
import json
import logging
import os
import shutil
import threading
from dataclasses import fields

import numpy as np
import pytest
from tests.edge_agent.personal.test_publishing import STANDING, joined, serve
from tests.edge_agent.personal.test_task_answers import trained
from tests.helpers.linear_bundle import SPEC, bundle
from typer.testing import CliRunner

from fleetune.edge_agent import Agent
from fleetune.edge_agent.cli import app
from fleetune.edge_agent.extensions.adoption.deployed_model import DeployedModel
from fleetune.edge_agent.library import agent as library
from fleetune.edge_agent.library.messages import ActivityReport, Ended, LogLine
from fleetune.edge_agent.library.options import AgentOptions
from fleetune.edge_agent.run.activity import CONNECTED, Activity
from fleetune.edge_agent.run_options import RunOptions
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.edge_agent.stream.intakes import write_queue
from fleetune.edge_agent.stream.sample_store import SampleStore
from fleetune.edge_agent.stream.status import status
from fleetune.protocols.errors import AgentClosed, FleetuneError, SettingError, StoreError
from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.settings.task import TaskSection
from fleetune.protocols.update import codec
from fleetune.protocols.wire.payloads import Enrolment

BROKER = "127.0.0.1:1"


class NoProcess:
    """In place of the child process: it does nothing, and `hear` is the test's to call."""

    def __init__(self, options, lock, hear):
        self.options, self.hear, self.closed = options, hear, False

    def start(self):
        pass

    def close(self, patience_s):
        self.closed = True


@pytest.fixture(autouse=True)
def no_process(monkeypatch):
    monkeypatch.setattr(library, "AgentProcess", NoProcess)
    monkeypatch.setattr(library, "LEFTOVER_S", 0.0)


@pytest.fixture
def agent(tmp_path):
    with Agent(BROKER, fleet="f", device="d", store=tmp_path) as found:
        yield found


@pytest.fixture
def store(agent):
    return joined(agent._store)


def kept(agent):
    return sum(row.train + row.test for row in library_status(agent).classes)


def library_status(agent):
    return status(agent._samples, 0.3)


def all_at_once(count, work):
    """`work(number)` in so many threads; what was raised."""
    problems, together = [], threading.Barrier(count)

    def run(number):
        together.wait()
        try:
            work(number)
        except BaseException as problem:  # noqa: BLE001 - told to the test
            problems.append(problem)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return problems


def test_samples_and_labels_of_many_threads_are_all_kept(agent):
    def work(number):
        for turn in range(20):
            name = agent.add([float(number), float(turn)])
            assert agent.label(name, turn % 3)

    assert all_at_once(8, work) == []
    assert agent.flush(60)
    counts = agent.state.samples
    assert (counts.train + counts.test, counts.unlabelled, counts.waiting) == (160, 0, 0)
    assert counts.new == counts.train
    assert counts.refused == {}


def test_add_says_the_id_it_was_given_or_one_by_the_content(agent):
    assert agent.add([1.0], id="w17") == "w17"
    assert agent.add([2.0], id=18) == "18"
    name = agent.add([3.0])
    assert name == agent.add(np.array([3.0]))
    assert name != agent.add([4.0])
    assert agent.label("18", 1)
    assert agent.flush(60)
    assert {row.name: row.train + row.test for row in library_status(agent).classes} == {
        "no label yet": 3,
        "1": 1,
    }


def test_an_array_may_be_used_again(agent):
    for dtype in (np.uint8, np.float32):
        window = np.zeros(50_000, dtype)
        for number in range(1, 5):
            window[:] = number
            agent.add(window)
    assert agent.flush(60)
    assert kept(agent) == 8


class Obstinate:
    def __array__(self, *_, **__):
        raise RuntimeError("on another device")


BAD = [
    ([np.nan], None, "not-finite"), ("text", None, "not-numbers"), ([[1], [1, 2]], None, "not-numbers"),
    ([], None, "empty"), (3.0, None, "empty"), (Obstinate(), None, "not-numbers"), ([1.0], -4, "label"),
    ([1.0], "cat", "label"), (None, None, "not-numbers"),
]  # fmt: skip


def test_bad_samples_are_counted_and_told_and_raise_nothing(agent, caplog):
    for x, y, _ in BAD:
        assert agent.add(x, y) is None
    assert agent.add([1.0], id="a\nb") is None
    assert agent.label("w", "cat") is False
    assert agent.label(None, 1) is False
    kinds = [kind for *_, kind in BAD] + ["name", "label", "name"]
    assert agent.state.samples.refused == {kind: kinds.count(kind) for kind in kinds}
    assert agent.state.last_error == "a sample's id must be 1 to 200 printable characters"
    assert caplog.text.count("not taken, not-numbers") == 1  # and no more for an hour
    assert agent.label("nobody", 1)  # found out when it is written
    assert agent.flush(60)
    assert agent.state.samples.refused["unknown"] == 1


def test_what_a_full_disk_keeps_waiting_is_bounded_counted_and_written_later(agent, monkeypatch):
    monkeypatch.setattr(write_queue, "RETRY_S", 0.01)
    full, add = threading.Event(), SampleStore.add

    def fails(self, *args, **kwargs):
        if full.is_set():
            raise StoreError("cannot write it: the disk is full")
        return add(self, *args, **kwargs)

    monkeypatch.setattr(SampleStore, "add", fails)
    full.set()
    agent._queue._max_bytes = 20_000
    names = [agent.add([float(number)] * 1000) for number in range(10)]
    assert [name is None for name in names] == [False] * 5 + [True] * 5
    assert not agent.flush(0.05)
    assert agent.state.samples.waiting == 5
    assert agent.state.samples.refused["disk"] >= 5
    full.clear()
    assert agent.flush(60)
    assert kept(agent) == 5


def test_there_is_no_answer_before_there_is_a_model_and_then_each_as_it_is_served(agent, store):
    assert agent.predict([1.0, 1.0]) is None
    assert agent.state.deployed is None
    assert agent.state.adopted is None
    for number in (0, 2, 1):
        serve(store, number)
        found = agent.predict([1.0, 1.0])
        assert (found.label, found.record.version, found.name) == (number, number + 1, str(number))
        assert agent.state.deployed.version == number + 1
        assert agent.state.adopted is True
    assert found.probabilities.shape == (3,)
    assert found.numbers is found.error is found.anomaly is found.quantiles is found.present is None
    assert agent.predict([np.nan, 1.0]) is None
    assert agent.predict([1.0, 1.0, 1.0]) is None
    assert agent.state.samples.refused == {"not-finite": 1, "shape": 1}
    many = agent.predict_many([[1.0, 1.0], [1.0], [3.0, 1.0]])
    assert [one and one.label for one in many] == [1, None, 1]
    result = CliRunner().invoke(
        app, ["rollback", "1", "--fleet", "f", "--device", "d", "--state", str(store.folder.parents[1])]
    )
    assert result.exit_code == 0, result.output
    assert agent.predict([1.0, 1.0]).record.version == 1


def test_threads_that_predict_while_models_change_see_one_or_the_other(agent, store):
    serve(store, 0)
    done = threading.Event()

    def work(number):
        if number == 0:
            for turn in range(30):
                serve(store, turn % 3)
            done.set()
            return
        while not done.is_set():
            found = agent.predict([1.0, 1.0])
            assert found.label == found.record.version - 1

    assert all_at_once(4, work) == []
    assert agent.predict([1.0, 1.0]).label == 2


def test_a_served_model_that_cannot_be_asked_is_said_once_and_asked_for_again(agent, store, caplog):
    serve(store, 1)
    whole = store.deployed.path.read_bytes()
    store.deployed.path.write_bytes(whole[:-9])
    for _ in range(3):
        assert agent.predict([1.0, 1.0]) is None
    assert caplog.text.count("the deployed model cannot be used") == 1
    assert "is damaged" in agent.state.last_error
    store.deployed.write(whole[8:])
    assert agent.predict([1.0, 1.0]).label == 1


def test_a_model_that_torch_trained_is_asked_by_a_bundle_of_its_owners(tmp_path):
    kept_in = joined(AgentStore(tmp_path / "f" / "d"))
    serve(kept_in, 2)
    shutil.rmtree(kept_in.folder / "bundles")
    (tmp_path / "exported").write_bytes(bundle().encoded())
    for file, label in ((None, None), (tmp_path / "exported", 2), (tmp_path / "nothing", None)):
        with Agent(BROKER, fleet="f", device="d", store=tmp_path, bundle=file) as agent:
            found = agent.predict([1.0, 1.0])
            assert (found and found.label) == label
            told = agent.state.last_error
            assert (told is None) == (found is not None)
    assert "cannot read bundle" in told


@pytest.mark.parametrize("kind", ["classification", "forecast", "reconstruction"])
def test_a_prediction_is_what_edge_agent_predict_says(kind, agent, tmp_path):
    section = TaskSection(kind=kind)
    trainer, weights, made, data = trained(section)
    spec, kept_in = trainer.spec, AgentStore(tmp_path / "f" / "d")
    enrolment = Enrolment(
        "r-1", 0, spec, {"name": "fedavg"}, TrainingSection(), 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, weights,
        task=section,
    )  # fmt: skip
    kept_in.enrolment("r-1").write(codec.encode(enrolment, spec))
    kept_in.keep_bundle("r-1", made.encoded())
    record = STANDING.__class__(
        "r-1",
        1,
        False,
        spec.hash,
        spec.input_shape,
        spec.num_classes,
        threshold=getattr(trainer.threshold(weights), "error", None),
    )
    kept_in.deployed.write(codec.encode(DeployedModel(record, weights), spec))
    np.save(tmp_path / "x.npy", data.x_test)
    here = ["--fleet", "f", "--device", "d", "--state", str(tmp_path)]
    said = CliRunner().invoke(app, ["predict", "--data", str(tmp_path / "x.npy"), *here, "--json"])
    assert said.exit_code == 0, said.output
    found = [agent.predict(one) for one in data.x_test]
    wanted = json.loads(said.output)
    for name in {"probabilities", "numbers", "error", "anomaly"} & wanted.keys():
        values = [getattr(one, name) for one in found]
        np.testing.assert_allclose(
            np.array(values, float), np.array(wanted[name], float), atol=2e-6, rtol=1e-5
        )
    if kind == "classification":
        assert [one.label for one in found] == wanted["labels"]
    assert {one.threshold for one in found} == {wanted.get("threshold")}
    assert all(str(one) for one in found)
    assert {one.task for one in found} == {kind}


def test_what_the_runs_model_cannot_take_is_refused_once_it_is_joined(agent, store):
    agent._process.hear(ActivityReport(Activity(CONNECTED, run="r-1", round=3)))
    assert agent.add([1.0, 2.0], 1)
    assert agent.add([1.0, 2.0, 3.0], 1)
    assert agent.add([1.0, 4.0], 7)
    assert agent.flush(60)
    assert agent.state.samples.refused == {"shape": 1, "class": 1}
    assert agent.state.round == 3
    assert agent.state.run == "r-1"


def test_begun_again_it_counts_by_what_it_knows_of_its_run_and_refuses_nothing_yet(tmp_path):
    for known in (False, True):
        with Agent(BROKER, fleet="f", device="d", store=tmp_path, test_fraction=0.5) as agent:
            agent.add([float(known), 2.0])
            agent.add([1.0, 2.0, 3.0, float(known)])
            assert agent.flush(60)
            counts = agent.state.samples
            assert (counts.train + counts.test, counts.unlabelled) == ((4, 0) if known else (0, 2))
            join_a_reconstruction(agent._store)


def join_a_reconstruction(store):
    spec, section = SPEC, TaskSection(kind="reconstruction")
    method, zeros = {"name": "fedavg"}, np.zeros(spec.size, np.float32)
    enrolment = Enrolment(
        "r-2", 0, spec, method, TrainingSection(), 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, zeros, task=section
    )
    store.enrolment("r-2").write(codec.encode(enrolment, spec))


def test_the_state_follows_the_process_and_its_log(agent, caplog):
    caplog.set_level(logging.INFO)
    assert agent.state.connection == "connecting"
    agent._process.hear(LogLine(logging.INFO, "fleetune.x", "joined"))
    assert agent.state.last_error is None
    agent._process.hear(ActivityReport(Activity(CONNECTED, "r-9", 4, training=True)))
    assert "f/d: connected; run r-9, round 4, training" in str(agent.state)
    agent._process.hear(LogLine(logging.WARNING, "fleetune.x", "hot: 90 C"))
    agent._process.hear(Ended("the agent's process ended (signal SIGKILL); it is restarted in 1 s"))
    state = agent.state
    assert (state.training, state.round) == (False, 4)
    assert state.connection.startswith("not connected: the agent's process ended (signal SIGKILL)")
    assert state.last_error.startswith("the agent's process ended")
    agent._process.hear(ActivityReport(Activity(CONNECTED, finished="r-9")))
    assert "connected; run r-9 is over" in str(agent.state)
    assert "deploys: no model yet" in str(agent.state)
    assert [record.levelname for record in caplog.records if record.name == "fleetune.x"] == [
        "INFO",
        "WARNING",
    ]


def test_waiting_ends_when_it_is_so_or_in_time(agent):
    assert agent.wait_for(lambda state: state.run is not None, 0.01) is None
    threading.Timer(0.05, agent._process.hear, [ActivityReport(Activity(CONNECTED, "r-1"))]).start()
    assert agent.wait_for(lambda state: state.run is not None, 60).run == "r-1"


def test_in_asyncio_waiting_holds_nothing_up(agent):
    async def main():
        waiting = asyncio.create_task(asyncio.to_thread(agent.wait_for, lambda state: state.round == 2, 60))
        for number in range(3):
            agent.add([float(number)])
            await asyncio.sleep(0)
        agent._process.hear(ActivityReport(Activity(CONNECTED, "r-1", round=2)))
        assert (await waiting).round == 2
        assert await asyncio.to_thread(agent.flush, 60)

    asyncio.run(main())
    assert kept(agent) == 3


def test_a_closed_agent_says_so_in_one_line_and_its_state_still_stands(tmp_path):
    agent = Agent(BROKER, fleet="f", device="d", store=tmp_path)
    for number in range(300):
        agent.add([float(number)])
    agent.close()
    agent.close()
    assert agent._process.closed
    calls = (
        lambda: agent.add([1.0]), lambda: agent.label("a", 1), lambda: agent.predict([1.0]),
        agent.flush, lambda: agent.wait_for(lambda _: True),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(AgentClosed, match=r"^the agent of f/d is closed; create another one$"):
            call()
    assert agent.state.samples.unlabelled == 300
    assert agent.state.connection == "closed"
    with Agent(BROKER, fleet="f", device="d", store=tmp_path) as again:
        assert again.state.samples.unlabelled == 300


def test_who_waits_when_it_is_closed_is_told(tmp_path):
    agent = Agent(BROKER, fleet="f", device="d", store=tmp_path)
    threading.Timer(0.05, agent.close).start()
    with pytest.raises(AgentClosed):
        agent.wait_for(lambda _: False, 60)


def test_a_second_agent_on_the_store_is_refused_in_one_line(agent, tmp_path):
    with pytest.raises(StoreError, match=r"^another agent uses \S+/f/d: stop it") as problem:
        Agent(BROKER, fleet="f", device="d", store=tmp_path)
    assert "\n" not in str(problem.value)
    Agent(BROKER, fleet="f", device="another", store=tmp_path).close()


def test_the_child_of_a_program_that_was_killed_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "LEFTOVER_S", 60.0)
    held = AgentStore(tmp_path / "f" / "d").claim()
    threading.Timer(0.1, held.close).start()
    Agent(BROKER, fleet="f", device="d", store=tmp_path).close()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"broker": "http://x"}, "use host:port"),
        ({"fleet": "a/b"}, "fleet"),
        ({"device": ""}, "device"),
        ({"keep_mbs": 3}, "unknown option keep_mbs"),
        ({"leave_after_run": True}, "unknown option leave_after_run"),
        ({"data": "npz:a.npz"}, "is not a stream"),
    ],
)
def test_what_is_wrong_is_one_line_and_holds_nothing(given, words, tmp_path):
    known = {"broker": BROKER, "fleet": "f", "device": "d", "store": tmp_path}
    with pytest.raises(SettingError, match=words):
        Agent(**known | given)
    Agent(**known).close()


def test_the_broker_may_stand_in_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("FLEETUNE_BROKER", raising=False)
    with pytest.raises(SettingError, match="has joined no fleet"):
        Agent(fleet="f", store=tmp_path)
    monkeypatch.setenv("FLEETUNE_BROKER", "edge:1884")
    with Agent(fleet="f", device="d", store=tmp_path, keep_mb=3) as agent:
        assert agent._process.options == {
            "broker": "edge:1884", "fleet": "f", "device": "d", "state": str(tmp_path), "data": "intake:",
            "keep_mb": 3,
        }  # fmt: skip


def test_a_process_that_does_not_begin_leaves_the_store_to_others(tmp_path, monkeypatch):
    class Fails(NoProcess):
        def start(self):
            raise SettingError("board: there is none of that name")

    monkeypatch.setattr(library, "AgentProcess", Fails)
    with pytest.raises(SettingError, match="board"):
        Agent(BROKER, fleet="f", device="d", store=tmp_path)
    AgentStore(tmp_path / "f" / "d").claim().close()


def test_its_options_are_those_of_edge_agent_run():
    own = {"fleet", "broker", "data", "device", "state", "leave_after_run"}
    assert set(AgentOptions.__annotations__) == {one.name for one in fields(RunOptions)} - own


def test_a_fork_has_no_agent(agent):
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:  # no test ends in here
        try:
            agent.add([1.0])
        except FleetuneError as problem:
            os.write(writing, str(problem).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reading, 999).startswith(b"this process was forked")
    os.close(reading)
    os.close(writing)
    assert agent.add([1.0])


def test_adding_does_not_wait_for_the_disk(agent, monkeypatch):
    slow, add = threading.Event(), SampleStore.add

    def waits(self, *args, **kwargs):
        assert slow.wait(60)
        return add(self, *args, **kwargs)

    monkeypatch.setattr(SampleStore, "add", waits)
    for number in range(100):
        agent.add([float(number)])
    assert agent.state.samples.waiting == 100
    slow.set()
    assert agent.flush(60)
    assert kept(agent) == 100
