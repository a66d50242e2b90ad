"""What nobody should send, sent to a running coordinator and to a running agent."""

import queue
import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from tests.helpers.fleet_processes import PATIENCE_S, Fleet, assert_equal, expected, run_toml
from tests.helpers.talk import sending_link

from fleetune.coordinator.run.enrolment import prepare
from fleetune.coordinator.run.stored_run import method_of
from fleetune.protocols.bundle.bundle import TRAIN
from fleetune.protocols.bundle.graph import Constant, Node
from fleetune.protocols.bundle.shipped import shipped_bundle
from fleetune.protocols.method.averaging import Update
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.method.method import Round
from fleetune.protocols.update import codec
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.reference_model import ReferenceModel
from fleetune.protocols.update.selection import Everything
from fleetune.protocols.wire import messages as wire
from fleetune.protocols.wire import topics
from fleetune.protocols.wire.capabilities import EVERYTHING
from fleetune.protocols.wire.messages import Ack, Offer, Refuse, Resume, TransferKey
from fleetune.protocols.wire.outbox import Sent
from fleetune.protocols.wire.pacing import MAX_CHUNK_BYTES
from fleetune.protocols.wire.payloads import Assignment, Measures, Reply, run_key
from fleetune.protocols.wire.transfer import digest_of, transfer_id
from fleetune.protocols.wire.transport import Connected, Received
from fleetune.protocols.wire.transport.mqtt import Broker, MqttTransport

pytestmark = pytest.mark.fleet


class Liar:
    """Says what it likes, in the name of a device or, to a device, of its coordinator."""

    def __init__(self, fleet, device, *, as_coordinator=False):
        self._fleet, self._device = fleet.name, device
        self._control = "down" if as_coordinator else "up"
        heard = topics.FROM_DEVICE if as_coordinator else topics.TO_DEVICE
        self._read = wire.read_from_device if as_coordinator else wire.read_to_device
        self._events, self._unread = queue.SimpleQueue(), []
        self._link = sending_link(device, "coordinator" if as_coordinator else "device")
        self._transport = MqttTransport(
            Broker("127.0.0.1", fleet.broker.port),
            f"liar-{device}",
            subscriptions=[topics.topic(fleet.name, device, channel) for channel in heard],
            events=self._events,
        )

    def __enter__(self):
        self._transport.connect()
        assert isinstance(self._events.get(timeout=PATIENCE_S), Connected)
        return self

    def __exit__(self, kind, problem, trace):
        self._transport.close()

    def publish(self, topic, data, *, retain=False):
        self._transport.publish(topic, data, retain=retain)

    def say(self, message, channel=None, *, retain=False):
        """A message, or bytes, on its own channel unless told otherwise."""
        data = message if isinstance(message, bytes) else wire.encode(message)
        self.publish(topics.topic(self._fleet, self._device, channel or self._control), data, retain=retain)

    def hear(self, kind, wanted=lambda _: True):
        """The next message of this kind; others wait until they are asked for."""
        for message in self._unread:
            if isinstance(message, kind) and wanted(message):
                self._unread.remove(message)
                return message
        while True:
            message = self._listen()
            if isinstance(message, kind) and wanted(message):
                return message
            self._unread.append(message)

    def send(self, transfer_key, payload):
        """A payload, honestly transferred; what became of it."""
        items = self._link.post(transfer_key, payload, 0.0)
        while True:
            for item in items:
                if isinstance(item, Sent):
                    return item
                self.say(item.data, item.channel)
            message, items = self._listen(), []
            if isinstance(message, Ack | Resume | Refuse):
                items = self._link.handle(message, 0.0)
            else:
                self._unread.append(message)

    def enrol(self):
        """Be there, and say that the enrolment is here."""
        self.say(wire.Presence(True, "x", reads=EVERYTHING), "state")
        offer = self.hear(Offer, lambda offer: offer.transfer_key.kind == "enrolment")
        self.say(Ack(offer.transfer, offer.num_bytes))

    def take_task(self, number):
        """Wait for the task of this round and say that it is here."""
        offer = self.hear(Offer, lambda offer: offer.transfer_key.round == number)
        self.say(Ack(offer.transfer, offer.num_bytes))
        return offer.transfer_key

    def _listen(self):
        while True:
            event = self._events.get(timeout=PATIENCE_S)
            if isinstance(event, Received) and not event.topic.endswith(("update", "task")) and event.data:
                return self._read(event.data)


def run_of(fleet):
    """The id of the run that its coordinator has begun."""
    fleet.coordinator.wait_for("begins")
    return re.search(r"run (\S+) begins", fleet.coordinator.lines("begins")[0])[1]


def offer_of(device, transfer_key, num_bytes=100, digest=None, transfer=None):
    digest = digest or digest_of(b"anything")
    return Offer(transfer or transfer_id(transfer_key, device, digest), digest, num_bytes, transfer_key)


def test_a_coordinator_refuses_whatever_is_wrong_in_one_line_each(tmp_path, tmp_path_factory):
    toml = run_toml()
    with Fleet(tmp_path, toml) as fleet:
        fleet.start_coordinator()
        run, model = run_of(fleet), prepare(fleet.settings).spec.hash
        report, update = DeviceReport("mallory"), TransferKey("update", run, 1, 1)
        up = [
            (b"\xff\x00 not JSON", "PacketCorrupt"),
            (b"{}", "PacketCorrupt"),
            (b'{"type":"Offer","errand":' + b"[" * 15_000, "PacketCorrupt"),
            (b" " * 20_000, "PacketTooLarge"),
            (wire.Presence(True, "x", reads=EVERYTHING), "PacketForeign"),
            (wire.Ready(run, "0" * 16, report), "PacketForeign"),
            (wire.Ready(run, model, DeviceReport("device-0")), "PacketForeign"),
            (wire.Ready(run, model, replace(report, ratio=0.55)), "PacketCorrupt"),
            (wire.Ready(run, model, replace(report, ratio=5.0)), "PacketCorrupt"),
            (wire.Ready(run, model, replace(report, num_samples=-1)), "PacketCorrupt"),
            (wire.Ready(run, model, report), "PacketForeign"),  # it was never enrolled
            (offer_of("mallory", update), "unknown"),
            (offer_of("mallory", update, num_bytes=2**60), "unknown"),
            (offer_of("mallory", update, transfer="../../x"), "PacketCorrupt"),
            (offer_of("mallory", replace_run(update, "other\nrun")), "PacketCorrupt"),
            (offer_of("mallory", TransferKey("enrolment", run)), "unknown"),
        ]
        others = [
            ("state", b"junk", "PacketCorrupt"),
            ("state", wire.Left(run), "PacketForeign"),
            ("update", b"short", "PacketTruncated"),
            ("update", bytes(MAX_CHUNK_BYTES + 100), "PacketTooLarge"),  # a longer one dies at the broker
            ("update", bytes(100), "PacketForeign"),
        ]
        wait_until_heard(fleet)
        with Liar(fleet, "mallory") as liar:
            for message, _ in up:
                liar.say(message)
            for channel, message, _ in others:
                liar.say(message, channel)
            for name in ("a b", "..", "-" * 65, "a/b"):
                liar.publish(f"fleetune/v1/{fleet.name}/{name}/up", wire.encode(wire.Left(run)))
            names = 3 * ["PacketForeign"]
            kinds = [kind for *_, kind in up] + [kind for *_, kind in others] + names
            fleet.coordinator.wait_for("refused", count=len(kinds))  # leaving drops what is unsent
        for device in fleet.shares:
            fleet.start_agent(device)
        fleet.wait_finished()
        refused = fleet.summary()["refused"]
        assert {kind: refused.get(kind) for kind in set(kinds)} == {kind: kinds.count(kind) for kind in kinds}
        assert len(fleet.coordinator.lines("refused")) == len(kinds)
        assert_equal(fleet.outcome(), expected(toml, tmp_path_factory.mktemp("simulated")))


def replace_run(transfer_key, run):
    return TransferKey(transfer_key.kind, run, transfer_key.round, transfer_key.attempt)


def wait_until_heard(fleet):
    """Until the coordinator listens: it offers its run to who comes.

    What is retained may reach it twice while it subscribes (amqtt), so it is nothing that would be counted.
    """
    with Liar(fleet, "greeter") as greeter:
        greeter.say(wire.Presence(True, "x", reads=EVERYTHING), "state", retain=True)
        greeter.hear(Offer)
        greeter.say(wire.Presence(False, "x"), "state", retain=True)


def test_forged_replies_of_a_participant_are_refused_and_change_nothing(tmp_path, tmp_path_factory):
    toml = run_toml(rounds=8, start_with=4)
    with Fleet(tmp_path, toml) as fleet:
        fleet.start_coordinator()
        run, spec = run_of(fleet), prepare(fleet.settings).spec
        values = np.ones(spec.num_parameters, np.float32)
        honest = Reply("mallory", 0, 1, False, Measures(10, 5), Update(Patch(Everything(), values), 10))
        giant = Update(Patch(Everything(), np.full_like(values, 3e38)), 10)
        greedy = Update(Patch(Everything(), values), 2**40)
        nan = Update(Patch(Everything(), np.full_like(values, np.nan)), 10)

        def encoded(number, **changes):
            return codec.encode(replace(honest, round=number, **changes), spec)

        forged = [
            (encoded(1, update=nan), "PacketNotFinite"),
            (encoded(2)[:4] + b"\x09" + encoded(2)[5:], "PacketVersion"),
            (encoded(3)[:-20], "PacketTruncated"),
            (encoded(7), "PacketForeign"),
            (encoded(5, device="device-0"), "PacketForeign"),
            (encoded(6, update=None), "PacketForeign"),
            (encoded(7, update=giant), "PacketOutlying"),
            (encoded(8, update=greedy), "PacketOverclaimed"),
            (encoded(9), "PacketForeign"),  # a final evaluation has no update
        ]
        wait_until_heard(fleet)
        with Liar(fleet, "mallory") as liar:
            liar.enrol()
            liar.say(wire.Ready(run, spec.hash, DeviceReport("mallory", num_samples=10)))
            for device in fleet.shares:
                fleet.start_agent(device)
            for number, (payload, kind) in enumerate(forged, start=1):
                task = liar.take_task(number)
                sent = liar.send(TransferKey("update", run, number, 1, task.final_evaluation), payload)
                assert kind in sent.refused
        fleet.wait_finished()
        found, refused = fleet.outcome(), fleet.summary()["refused"]
        assert len(fleet.coordinator.lines("refused: mallory: ")) == len(forged)
    assert refused["PacketForeign"] == 4
    assert refused["engine-declined"] == len(forged)
    wanted = expected(run_toml(rounds=8), tmp_path_factory.mktemp("simulated"))
    assert found.shared == wanted.shared
    assert found.personal == wanted.personal
    assert {device: found.traffic[device] for device in wanted.traffic} == wanted.traffic
    assert found.traffic["mallory"][1] == 0


def test_an_agent_that_is_overtaken_goes_on_with_the_newest_task(tmp_path):
    with Fleet(tmp_path, run_toml(method="fedavg", epochs=400)) as fleet:
        agent = fleet.start_agent("device-0")
        agent.wait_for("connected")
        enrolment = prepare(fleet.settings)
        with Liar(fleet, "device-0", as_coordinator=True) as hurried:
            hurried.send(TransferKey("enrolment", enrolment.run), codec.encode(enrolment, enrolment.spec))
            hurried.hear(wire.Ready)
            for number in (1, 2, 3):
                payload = codec.encode(replace(first_task(enrolment), round=number), enrolment.spec)
                assert hurried.send(TransferKey("task", enrolment.run, number, 1), payload).refused is None
            assert hurried.hear(Offer).transfer_key == TransferKey("update", enrolment.run, 3, 1)
        assert len(agent.lines("round 1: training")) == len(agent.lines("round 3: training")) == 1
        # it may begin before the third task has come, and is then discarded as well
        begun = agent.lines("round 2: training")
        assert len(begun) == len(agent.lines("round 2 was over before this device's work was done"))
        assert agent.lines("round 1 was over before")


def first_task(enrolment):
    method = method_of(enrolment)
    round_ = Round(1, ("device-0",))
    _, tasks = method.plan(method.init_coordinator(enrolment.weights), round_, run_key(0))
    return Assignment("device-0", 1, 1, False, tasks["device-0"])


def test_an_agent_declines_whatever_is_wrong_and_lives(tmp_path):
    with Fleet(tmp_path, run_toml(method="fedavg")) as fleet:
        agent = fleet.start_agent("device-0")
        agent.wait_for("connected")
        enrolment = prepare(fleet.settings)
        spec, run, honest = enrolment.spec, enrolment.run, first_task(enrolment)

        def encoded(**changes):
            return codec.encode(replace(enrolment, **changes), spec)

        with Liar(fleet, "device-0", as_coordinator=True) as liar:
            for channel, data in [
                ("down", b"\xff junk"),
                ("down", b" " * 20_000),
                ("down", wire.encode(wire.Left(run))),
                ("task", b"short"),
                ("task", bytes(100)),
                ("down", wire.encode(offer_of("device-0", TransferKey("enrolment", "../../etc")))),
                ("down", wire.encode(offer_of("device-0", TransferKey("update", run, 1, 1)))),
            ]:
                liar.say(data, channel)
            agent.wait_for("refused a packet", count=7)
            for name, payload, reason in [
                ("damaged", encoded(run="damaged")[:-9], "cut short"),
                ("foreign", encoded(run="another"), "sent for run 'foreign'"),
                ("method", encoded(run="method", method={"name": "magic"}), "no method 'magic'"),
                ("weights", encoded(run="weights", weights=enrolment.weights[:9]), "do not fit"),
            ]:
                assert liar.send(TransferKey("enrolment", name), payload).refused is None
                assert reason in liar.hear(wire.Decline, lambda said, name=name: said.run == name).reason
            assert liar.send(TransferKey("enrolment", run), encoded()).refused is None
            assert liar.hear(wire.Ready).model_hash == spec.hash
            assert "not enrolled" in liar.send(TransferKey("task", "other", 1, 1), b"x").refused
            nan = replace(honest.task.patch, values=honest.task.patch.values * np.float32(np.nan))
            for attempt, payload, reason in [
                (1, codec.encode(honest, spec)[:-9], "cut short"),
                (2, codec.encode(replace(honest, device="device-1"), spec), "device-1"),
                (3, codec.encode(replace(honest, task=replace(honest.task, patch=nan)), spec), "NaN"),
            ]:
                assert liar.send(TransferKey("task", run, 1, attempt), payload).refused is None
                assert reason in liar.hear(wire.Decline, lambda said, a=attempt: said.attempt == a).reason
            unread = codec.encode(replace(honest, attempt=4, base="0" * 32), spec)
            for answer in (wire.Ready, wire.Decline):  # it asks for all of it once
                assert liar.send(TransferKey("task", run, 1, 4), unread).refused is None
                said = liar.hear(answer)
                if answer is wire.Ready:
                    assert said.base == ReferenceModel.whole(enrolment.weights).digest
            assert (said.round, said.attempt) == (1, 4)
            assert said.reason.startswith("it asked for the whole task, and was sent a difference")
            assert liar.send(TransferKey("task", run, 2, 1), codec.encode(replace(honest, round=2), spec))
            assert liar.hear(Offer).transfer_key == TransferKey("update", run, 2, 1)
        assert len(agent.lines("declined")) == 8
        assert not agent.lines("Traceback")
        assert agent.stop() == 0


def spoilt(made, *nodes, constants=()):
    """A bundle whose training graph does something more."""
    train = made.graphs[TRAIN]
    worse = replace(train, nodes=(*train.nodes, *nodes), constants=(*train.constants, *constants))
    return replace(made, graphs={**made.graphs, TRAIN: worse})


def hostile_bundles(made):
    """Bundles, and why an agent declines each."""
    zero = Constant("zero", np.array([0])), Constant("least", np.array([-(2**63)]))
    square = Constant("square", np.ones((1024, 1024), np.float32))
    names = ["square", *(f"product {index}" for index in range(2000))]
    products = [Node("MatMul", (before, "square"), (after,), {}) for before, after in pairwise(names)]
    size = Constant("size", np.array([2**30]))
    divided = Node("Div", ("least", "zero"), ("never",), {})
    yield spoilt(made, divided, constants=zero), "Div is of whole numbers"
    yield spoilt(made, replace(divided, op="Mod"), constants=zero), "'Mod' is not known"
    yield spoilt(made, *products, constants=[square]), "operations; a model like this may take"
    huge = Node("Expand", ("loss", "size"), ("huge",), {})
    yield spoilt(made, huge, constants=[size]), "operations; a model like this may take"


def test_an_agent_declines_hostile_bundles_and_lives(tmp_path):
    with Fleet(tmp_path, run_toml(method="fedavg")) as fleet:
        agent = fleet.start_agent("device-0", trainer="onnx")
        agent.wait_for("connected")
        enrolment, made = prepare(fleet.settings), shipped_bundle("mlp", (1, 8, 8), 10)
        assert made.spec.hash == enrolment.spec.hash
        with Liar(fleet, "device-0", as_coordinator=True) as liar:
            for number, (worse, reason) in enumerate(hostile_bundles(made)):
                run = f"run-{number}"
                payload = codec.encode(replace(enrolment, run=run), made.spec)
                assert liar.send(TransferKey("enrolment", run), payload).refused is None
                assert liar.hear(wire.Fetch).run == run
                assert liar.send(TransferKey("bundle", run), worse.encoded()).refused is None
                assert reason in liar.hear(wire.Decline, lambda said, run=run: said.run == run).reason
            run = enrolment.run
            assert (
                liar.send(TransferKey("enrolment", run), codec.encode(enrolment, made.spec)).refused is None
            )
            assert liar.hear(wire.Fetch).run == run
            assert liar.send(TransferKey("bundle", run), made.encoded()).refused is None
            assert liar.hear(wire.Ready).run == run
        assert not agent.lines("Traceback|unexpected")
        assert agent.stop() == 0


def test_five_hundred_forged_devices_hold_no_round_up(tmp_path):
    toml = run_toml()
    with Fleet(tmp_path, toml) as fleet:
        fleet.start_coordinator()
        run, model = run_of(fleet), prepare(fleet.settings).spec.hash
        wait_until_heard(fleet)
        with Liar(fleet, "mallory") as liar:
            for number in range(500):
                name = f"ghost-{number}"
                ready = wire.Ready(run, model, DeviceReport(name, num_samples=10))
                liar.publish(topics.topic(fleet.name, name, "up"), wire.encode(ready))
            for device in fleet.shares:
                fleet.start_agent(device)
            fleet.wait_finished()
        summary = fleet.summary()
        assert summary["refused"]["PacketForeign"] == 500
        assert set(summary["by_device"]) == set(fleet.shares)
        assert len(fleet.coordinator.lines("refused")) <= 310  # not a line for each
