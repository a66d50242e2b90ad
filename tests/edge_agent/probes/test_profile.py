"""What an agent measures of its board, its training and its link, and what `edge-agent profile` tells."""

import os
import queue
import shutil
import subprocess

import msgspec
import numpy as np
import pytest
from tests.edge_agent.probes.test_probes import Clock
from tests.helpers import boards
from tests.helpers.boards import estimates
from tests.helpers.ports import free_port
from tests.helpers.slow_proxy import SlowProxy
from tests.protocols.wire.test_transport import KINDS, is_connected, is_received, wait_for
from typer.testing import CliRunner

from fleetune import firmware_profiles
from fleetune.coordinator.broker.embedded_broker import EmbeddedBroker
from fleetune.coordinator.run.enrolment import prepare
from fleetune.coordinator.spec.spec_from_torch import draw
from fleetune.edge_agent.cli import app
from fleetune.edge_agent.probes import save_profile, show, workload
from fleetune.edge_agent.probes.board_measurement import (
    PROCESSOR_ALONE,
    BoardMeasurement,
    Figure,
    measure_board,
)
from fleetune.edge_agent.probes.board_profile import board_named
from fleetune.edge_agent.probes.link_speed import LinkSpeed, measure_link
from fleetune.edge_agent.probes.training_speed import TrainingSpeed, measure_training
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.edge_agent.training.device_data import DeviceData
from fleetune.edge_agent.training.torch_backend import TorchBackend
from fleetune.edge_agent.training.trainers import Trainers
from fleetune.protocols.errors import ModelError, SettingError, TrainingStopped
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.settings.run_toml import parse_run
from fleetune.protocols.update import codec
from fleetune.protocols.update.selection import Neurons
from fleetune.protocols.wire import topics
from fleetune.protocols.wire.transport import Received
from fleetune.protocols.wire.transport.mqtt import Broker, MqttTransport

# Training


def small(num_samples=40):
    spec, weights = draw("mlp", (1, 8, 8), 10, Key.of("small"))
    noise = Key.of("samples").generator()
    x = noise.normal(size=(num_samples, 1, 8, 8)).astype(np.float32)
    y = np.arange(num_samples) % 10
    return TorchBackend.from_spec(spec), DeviceData(x, y, x[:0], y[:0], x[:0], y[:0]), weights


def test_training_speed_counts_samples_by_the_clock_after_a_first_step():
    backend, data, weights = small()
    settings = TrainingSection(batch_size=16)  # 40 samples: batches of 16, 16 and 8
    before = weights.copy()
    found = measure_training(backend, data, settings, weights, (0.5, 1.0), seconds=2, clock=Clock(1.0))
    assert [(speed.ratio, speed.samples_per_s) for speed in found] == [(0.5, 12), (1.0, 12)]
    found = measure_training(backend, data, settings, weights, seconds=5, clock=Clock(1.0))
    assert found[0].samples_per_s == pytest.approx((16 + 8 + 16 + 16 + 8) / 5)
    np.testing.assert_array_equal(weights, before)


def test_at_least_two_steps_count_and_a_small_share_is_enough_data():
    backend, data, weights = small(num_samples=3)
    found = measure_training(backend, data, TrainingSection(), weights, seconds=0, clock=Clock(2.0))
    assert found[0].samples_per_s == 3 / 2


def test_measuring_does_not_diverge_where_training_would():
    backend, data, weights = small()
    wild = TrainingSection(learning_rate=1e6, momentum=0.9, weight_decay=0.1)
    found = measure_training(backend, data, wild, weights, seconds=100, clock=Clock(1.0))
    assert found[0].samples_per_s > 0


def test_measuring_stops_when_the_agent_does():
    backend, data, weights = small()
    answers = iter([None, None, "the agent stops"])
    with pytest.raises(TrainingStopped, match="the agent stops"):
        measure_training(backend, data, TrainingSection(), weights, stop=lambda: next(answers))


def test_the_peak_is_of_the_steps(tmp_path):
    from fleetune.edge_agent.probes.memory import PeakMemory

    backend, data, weights = small()
    root = boards.pi_zero().build(tmp_path)
    (root / "proc/self/clear_refs").write_text("")
    (root / "proc/self/status").write_text(boards.STATUS.replace("420000", "400000"))
    found = measure_training(backend, data, TrainingSection(), weights, seconds=0, memory=PeakMemory(root))
    assert found[0].peak_bytes == 400_000 * 1024


@pytest.mark.parametrize("name", ["mlp", "lenet5", "resnet8", "har-cnn"])
def test_a_model_by_name_freezes_shares_of_every_inner_layer(name):
    work = workload.workload_by_name(name, trainers=Trainers("torch"))
    spec = work.backend.spec
    assert work.flops_per_sample > 2 * spec.num_parameters
    whole = Neurons(1.0, 1).mask(spec)
    assert whole.sum() == spec.num_parameters
    half = Neurons(0.5, 1).mask(spec)
    last = list(spec.layers)[-1]
    for layer, where in spec.layers.items():
        assert half[where].mean() == (1 if layer == last else pytest.approx(0.5, abs=0.02))
    assert measure_training(work.backend, work.data, work.settings, work.weights, (0.5,), seconds=0)


RUN = {
    "run": {"name": "f"},
    "model": {"name": "mlp", "input_shape": [1, 8, 8], "num_classes": 7},
    "method": {"name": "fedavg"},
    "data": {"source": "digits"},
    "training": {"batch_size": 5},
}


def test_the_model_of_the_last_run_joined_is_the_fleets(tmp_path):
    store = AgentStore(tmp_path)
    assert workload.choose_workload(None, store, 1).backend.spec.name == workload.REFERENCE
    enrolment = prepare(parse_run(RUN))
    store.enrolment(enrolment.run).write(codec.encode(enrolment, enrolment.spec))
    store.enrolment("damaged").write(b"x")
    os.utime(tmp_path / "runs" / "damaged", (2**32, 2**32))  # the latest
    work = workload.choose_workload(None, store, 1)
    assert (work.backend.spec.hash, work.settings.batch_size) == (enrolment.spec.hash, 5)
    assert work.flops_per_sample == enrolment.flops_per_sample
    assert enrolment.run in work.where_from
    assert workload.choose_workload("har-cnn", store, 1).backend.spec.name == "har-cnn"


# Link


@pytest.fixture(params=KINDS)
def broker(request, tmp_path):
    with EmbeddedBroker.start(tmp_path / "broker", which=request.param) as running:
        yield running


def left_on(port, topic):
    """What a newcomer finds there."""
    events = queue.SimpleQueue()
    client = MqttTransport(Broker("127.0.0.1", port), "later", subscriptions=[topic, "end"], events=events)
    client.connect()
    wait_for(events, is_connected)
    client.publish("end", b"end")
    found = []
    while (event := wait_for(events, is_received)).topic != "end":
        found.append(event)
    client.close()
    return found


def test_the_link_is_measured_and_nothing_stays_on_the_broker(broker):
    found = measure_link(Broker("127.0.0.1", broker.port), "f", "d")
    assert found.unknown == ""
    assert min(found.uplink_bps, found.downlink_bps) > 1e6
    assert 0 < found.round_trip_s < 5
    assert left_on(broker.port, topics.topic("f", "d", "probe")) == []


def test_uplink_and_downlink_are_told_apart(broker):
    with SlowProxy(broker.port, uplink_bps=600_000) as proxy:
        found = measure_link(Broker("127.0.0.1", proxy.port), "f", "d")
    assert found.uplink_bps < 1.1 * 600_000
    assert found.downlink_bps > 3 * found.uplink_bps


def test_the_agent_itself_may_stay_connected(broker):
    events = queue.SimpleQueue()
    names = topics.device_subscriptions("f", "d")
    agent = MqttTransport(Broker("127.0.0.1", broker.port), "f-d", subscriptions=names, events=events)
    agent.connect()
    wait_for(events, is_connected)
    measure_link(Broker("127.0.0.1", broker.port), "f", "d")
    agent.publish(topics.topic("f", "d", "down"), b"still here")
    assert wait_for(events, lambda _: True) == Received(topics.topic("f", "d", "down"), b"still here")
    agent.close()


def test_a_broker_that_is_not_there_leaves_the_link_unknown():
    found = measure_link(Broker("127.0.0.1", free_port()), "f", "d")
    assert (found.uplink_bps, found.downlink_bps, found.round_trip_s) == (None, None, None)
    assert "no program listens there" in found.unknown


@pytest.fixture
def mosquitto(tmp_path):
    """Starts one with some lines of configuration; gives its port."""
    program = shutil.which("mosquitto", path="/usr/sbin:/usr/bin:/usr/local/sbin")
    if program is None:
        pytest.skip("mosquitto is not installed")
    started = []

    def start(*lines):
        port = free_port()
        path = tmp_path / "mosquitto.conf"
        path.write_text(
            "\n".join([f"listener {port} 127.0.0.1", "allow_anonymous true", "user root", *lines])
        )
        started.append(subprocess.Popen([program, "-c", str(path)], stderr=subprocess.DEVNULL))
        wait_until_open(port)
        return port

    yield start
    for process in started:
        process.kill()
        process.wait()


def wait_until_open(port):
    events = queue.SimpleQueue()
    client = MqttTransport(Broker("127.0.0.1", port), "first", subscriptions=[], events=events)
    client.connect()
    wait_for(events, is_connected)
    client.close()


def test_a_broker_that_takes_small_messages_only_is_measured_with_those(mosquitto):
    port = mosquitto("max_packet_size 50000")
    found = measure_link(Broker("127.0.0.1", port), "f", "d")
    assert min(found.uplink_bps, found.downlink_bps) > 0
    assert found.unknown == ""
    assert left_on(port, topics.topic("f", "d", "probe")) == []


def test_a_device_without_the_right_to_its_topic_gets_the_reason(mosquitto, tmp_path):
    rights = tmp_path / "rights"
    rights.write_text("topic write fleetune/v1/f/d/probe\n")
    rights.chmod(0o600)
    found = measure_link(Broker("127.0.0.1", mosquitto(f"acl_file {rights}")), "f", "d", patience_s=1)
    assert found.downlink_bps is None
    assert "needs the right to write and read" in found.unknown


def test_a_device_does_not_listen_to_its_probes_nor_does_the_coordinator():
    heard = [*topics.device_subscriptions("f", "d"), *topics.coordinator_subscriptions("f")]
    assert not [name for name in heard if name.endswith("/probe")]


# The whole


def look(make, tmp_path, **options):
    board = make()
    return measure_board(board.build(tmp_path), board.run, sleep=lambda _: None, clock=Clock(0.5), **options)


def test_every_figure_is_known_or_says_why_not(tmp_path):
    for make in (*boards.ALL, boards.FakeBoard):
        found = look(make, tmp_path / make.__name__)
        for name, figure in found.figures.items():
            assert figure.value is not None or figure.note, name
        assert show.as_table(found)
        told = msgspec.json.decode(show.as_json(found))
        assert told["figures"].keys() == found.figures.keys()
        assert told["figures"]["uplink_bps"]["value"] is None


def test_a_jetson_with_training_and_a_link(tmp_path):
    link = LinkSpeed(uplink_bps=11.33e6, downlink_bps=52.87e6, round_trip_s=0.04)
    found = look(
        boards.jetson_nano, tmp_path, workload=lambda: workload.workload_by_name("mlp"), link=lambda: link
    )
    assert (found.board, found.sensors) == ("jetson-nano", ("ina3221", "thermal", "throttled"))
    assert [speed.ratio for speed in found.training] == [0.2, 0.6, 1.0]
    for name in ("idle_w", "train_w", "watts"):
        assert found.figures[name].value == pytest.approx(2.35)
    assert found.figures["uplink_bps"] == Figure(11.33e6, "bit/s", "to the broker")


def test_what_may_not_be_read_is_named(tmp_path, monkeypatch):
    board = boards.n100()
    root = board.build(tmp_path)
    energy = root / "sys/class/powercap/intel-rapl:0/energy_uj"
    monkeypatch.setattr("os.access", lambda path, _: path != energy)
    (root / "sys/class/powercap/intel-rapl:0/energy_uj").write_text("")
    (root / "sys/class/powercap/intel-rapl:0:1/energy_uj").write_text("")
    found = measure_board(root, board.run)
    assert found.figures["idle_w"].note == f"no permission to read {energy}"


def test_without_a_trainer_training_is_unknown(tmp_path):
    def workload():
        raise ModelError("no trainer is installed here")

    found = look(boards.pi_zero, tmp_path, workload=workload)
    assert (found.training, found.trained) == ((), "no trainer is installed here")
    assert "train_w" not in found.figures


# Saving


def surveyed(**figures):
    told = {"model": Figure("My Board"), "processor": Figure(None)} | figures
    speeds = (TrainingSpeed(0.5, 90.0, None), TrainingSpeed(1.0, 100.0, None))
    return BoardMeasurement("raspberry-pi-4b", ("thermal",), told, speeds, "a model", flops_per_sample=3e7)


def test_a_saved_profile_holds_what_was_measured_and_the_rest_of_the_board_that_fits(tmp_path):
    found = surveyed(
        cores=Figure(3),
        fitted_bytes=Figure(1000 * 2**20 + 5),
        uplink_bps=Figure(2e6),
        idle_w=Figure(1.5, "W", "pmic"),
    )
    save_profile.save(found, tmp_path / "mine.toml")
    board, known = board_named(str(tmp_path / "mine.toml")), firmware_profiles.load("raspberry-pi-4b")
    assert (board.name, board.title, board.cores, board.memory_bytes) == ("mine", "My Board", 3, 1000 * 2**20)
    assert (board.training_gflops, board.uplink_bps, board.idle_w) == (3.0, 2e6, 1.5)
    assert (board.downlink_bps, board.max_celsius, board.train_w) == (
        known.downlink_bps,
        known.max_celsius,
        known.train_w,
    )
    assert board.sensors == ("thermal",)
    assert "idle_w" not in estimates(board)


def test_a_board_that_idles_at_more_than_others_draw_busy_is_still_a_board(tmp_path):
    save_profile.save(surveyed(idle_w=Figure(50.0, "W", "pmic")), tmp_path / "mine.toml")
    board = board_named(str(tmp_path / "mine.toml"))
    assert (board.idle_w, board.train_w, board.transmit_w) == (50, 50, 50)
    assert {"train_w", "transmit_w"} <= set(estimates(board))


def test_a_processors_energy_is_not_saved_as_the_boards(tmp_path):
    save_profile.save(surveyed(idle_w=Figure(0.5, "W", PROCESSOR_ALONE)), tmp_path / "mine.toml")
    assert board_named(str(tmp_path / "mine.toml")).idle_w == firmware_profiles.load("raspberry-pi-4b").idle_w


def test_figures_that_no_board_has_are_one_line(tmp_path):
    with pytest.raises(SettingError) as caught:
        save_profile.save(surveyed(uplink_bps=Figure(1e30)), tmp_path / "mine.toml")
    assert "uplink_mbps" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_boards_by_name_and_by_file(tmp_path, monkeypatch):
    assert board_named("jetson-nano").name == "jetson-nano"
    save_profile.save(surveyed(), tmp_path / "mine.toml")
    monkeypatch.chdir(tmp_path)
    assert board_named("mine.toml") == board_named("./mine.toml")
    (tmp_path / "wrong.toml").write_text("title = 1")
    for name, said in (
        ("nope", "known: "),
        ("nope.toml", "nope.toml"),
        ("./wrong.toml", "title"),
        ("./", "is a folder"),
    ):
        with pytest.raises(SettingError, match=said) as caught:
            board_named(name)
        assert "\n" not in str(caught.value)


# The command


def command(*words):
    return CliRunner().invoke(app, ["profile", *words])


def test_the_command_measures_and_saves(broker, tmp_path):
    where = [
        "--broker",
        f"127.0.0.1:{broker.port}",
        "--fleet",
        "f",
        "--device",
        "d",
        "--state",
        str(tmp_path),
    ]
    done = command(*where, "--model", "mlp", "--json", "--save", str(tmp_path / "mine.toml"))
    assert done.exit_code == 0, done.output
    told = msgspec.json.decode(done.stdout)
    assert [speed["ratio"] for speed in told["training"]] == [0.2, 0.6, 1.0]
    assert told["figures"]["uplink_bps"]["value"] > 0
    assert told["figures"]["memory_bytes"]["value"] > 0
    board = board_named(str(tmp_path / "mine.toml"))
    assert board.uplink_bps == pytest.approx(told["figures"]["uplink_bps"]["value"], rel=1e-3)


def test_the_command_as_a_table_of_the_board_below_another_root(monkeypatch, tmp_path):
    monkeypatch.setattr("fleetune.edge_agent.probes.board_measurement._IDLE_S", 0.01)
    done = command("--root", str(boards.jetson_nano().build(tmp_path)), "--model", "mlp")
    assert done.exit_code == 0
    assert "NVIDIA Jetson Nano" in done.stdout
    assert "2.35 W" in done.stdout
    assert "unknown" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "lenet"], "did you mean 'lenet5'"),
        (["--device", "a/b"], "device 'a/b'"),
        (["--fleet", "f", "--broker", "http://x"], "use host:port"),
        (["--save", "my.json"], "ends in .toml"),
        (["--save", "generic.toml"], "ends in .toml, other than generic.toml"),
    ],
)
def test_mistakes_are_one_line(words, said):
    done = command(*words)
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
