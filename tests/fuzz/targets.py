"""What is fuzzed: honest packets of every kind, each with what reads it on its real side."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tests.conftest import PullToTarget
from tests.fuzz.mutation import JSON, PAYLOAD, Wrapping
from tests.helpers.every_method import SETTINGS
from tests.helpers.linear_bundle import SPEC as LINEAR
from tests.helpers.linear_bundle import bundle, training_graph
from tests.helpers.talk import FLEET, SPEC, AgentTalk, Coordinating, Memory, enrolment_of, run_settings

from fleetune.coordinator.run.stored_run import Run
from fleetune.edge_agent.budget.ratio_controller import read_ratio_controller
from fleetune.edge_agent.extensions.session_state import read_state
from fleetune.edge_agent.run.session import Session
from fleetune.protocols.bundle.bundle import read_bundle
from fleetune.protocols.bundle.graph_cost import cost_of
from fleetune.protocols.bundle.onnx_file import write_onnx
from fleetune.protocols.bundle.ort_training import cut
from fleetune.protocols.bundle.shipped import MODELS, bundle_path
from fleetune.protocols.method.choice import Budget, DeviceReport
from fleetune.protocols.method.method import Round
from fleetune.protocols.methods import create, from_section
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.update import codec
from fleetune.protocols.wire import messages as wire
from fleetune.protocols.wire import topics
from fleetune.protocols.wire.capabilities import EVERYTHING
from fleetune.protocols.wire.messages import TransferKey
from fleetune.protocols.wire.payloads import Assignment, Reply, read_enrolment, run_key
from fleetune.protocols.wire.transfer import Chunk, Offer, digest_of, transfer_id
from fleetune.protocols.wire.transport import Received

DIGEST = "0" * 32
LIMIT = codec.payload_limit(SPEC)


@dataclass
class Target:
    """Something that reads packets.

    Attributes:
        name: what it is.
        packets: honest ones.
        wrapping: how they are made; None: they are bytes.
        read: reads one as its receiver would.
    """

    name: str
    packets: list[bytes]
    wrapping: Wrapping | None
    read: Callable[[bytes], Any]
    weight: int = field(default=1, kw_only=True)


def all_targets(closing: ExitStack) -> list[Target]:
    """Anew: some of them remember what they have read."""
    targets = [
        *_methods(),
        _enrolments(),
        *_bundles(),
        _coordinator(closing),
        _agent(closing),
        Target("topic", [b"fleetune/v1/talk/a/up"], None, _read_topic),
        Target("chunk", [Chunk(DIGEST, 8, b"data").encode()], None, Chunk.decode),
        Target("allowance", [b"\x80"], None, read_ratio_controller),
        Target("training model", [_training_model()], None, lambda data: cut(data, ["loss"])),
    ]
    return [target for target in targets for _ in range(target.weight)]


def _read_topic(data: bytes) -> None:
    topics.parse(data.decode("utf-8", "replace"))


def _training_model() -> bytes:
    return write_onnx(training_graph())


def _methods() -> Iterator[Target]:
    weights = enrolment_of(run_settings()).weights
    for name, settings in SETTINGS:
        enrolment = enrolment_of(run_settings(), method={"name": name, **settings}, weights=weights)
        method = create(name, SPEC, settings)
        state = method.admit(method.init_coordinator(weights), DeviceReport("a", num_samples=10, ratio=0.5))
        planned, tasks = method.plan(state, Round(1, ("a",)), run_key(1).child("plan", 1, 1))
        task = codec.encode(Assignment("a", 1, 1, False, tasks["a"]), SPEC)
        final_evaluation = codec.encode(Assignment("a", 1, 1, True, tasks["a"]), SPEC)
        memory = Memory()
        reply = _session(enrolment, method, memory).reply(task, Budget(1.0))
        assert memory.data is not None
        label = "-".join([name, *settings])
        yield Target(f"{label} task", [task, final_evaluation], PAYLOAD, _answering(enrolment, method))
        yield Target(f"{label} reply", [reply], PAYLOAD, _aggregating(method, planned))
        yield Target(f"{label} session", [memory.data], PAYLOAD, _recalling(method))


def _session(enrolment, method, memory):
    return Session(enrolment, "a", method, PullToTarget(SPEC, "a"), memory)


def _answering(enrolment, method):
    return lambda packet: _session(enrolment, method, Memory()).reply(packet, Budget(1.0))


def _aggregating(method, planned):
    kind = Reply[method.update_type]

    def read(packet: bytes) -> None:
        reply = codec.decode(packet, kind, SPEC, limit=LIMIT)
        if reply.update is not None:
            with np.errstate(all="ignore"):
                method.shared_model(method.aggregate(planned, iter([("a", reply.update)])))

    return read


def _recalling(method):
    return lambda packet: read_state(packet, method)


def _enrolments() -> Target:
    settings = [{"name": name, **settings} for name, settings in SETTINGS]
    packets = [codec.encode(enrolment_of(run_settings(), method=method), SPEC) for method in settings]

    def read(packet: bytes) -> None:
        enrolment = read_enrolment(packet)
        method = from_section(enrolment.method, enrolment.spec)
        method.init_device(enrolment.weights)
        method.choices(DeviceReport("a", num_samples=10))

    return Target("enrolment", packets, PAYLOAD, read, weight=10)


def _bundles() -> Iterator[Target]:
    def read(packet: bytes) -> None:
        made = read_bundle(packet)
        for name, graph in made.graphs.items():
            cost_of(name, graph, 32)
            write_onnx(graph.keeping(set(graph.output_names[:1])))

    yield Target("small bundle", [bundle().encoded()], PAYLOAD, read, weight=10)
    shipped = [bundle_path(*model).read_bytes() for model in MODELS]
    yield Target("shipped bundle", shipped, PAYLOAD, read)
    assert LINEAR.size < 100


def _coordinator(closing: ExitStack) -> Target:
    folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
    talk = Coordinating.of(folder, run_settings(start_with=2, rounds=1000))
    closing.callback(talk.close)
    for device in ("a", "b"):
        talk.greet(device, num_samples=10)
    talk.server.parts.admission.timer = lambda: float(count)  # slowly enough for all of it to be read
    run: Run = talk.run
    transfer_key = TransferKey("update", talk.id, 1, 1)
    digest = digest_of(b"anything")
    said = [
        wire.Presence(True, "x", "fleetune", reads=EVERYTHING),
        Offer(transfer_id(transfer_key, "a", digest), digest, 8, transfer_key),
        wire.Resume(DIGEST, 4),
        wire.Ack(DIGEST, 8),
        wire.Refuse(DIGEST, "no"),
        wire.Fetch(talk.id),
        wire.Ready(talk.id, run.enrolment.spec.hash, DeviceReport("a", num_samples=10, samples_per_s=5.0)),
        wire.Working(talk.id, 1, "training", 0.5),
        wire.Measured(talk.id, 1, 1, RoundCost(bytes_down=1, train_s=0.5), RoundCost(joules=1.0)),
        wire.Decline(talk.id, 1, 1, "too hot"),
        wire.Left(talk.id),
        wire.Pong("n"),
    ]
    count = 0

    def read(packet: bytes) -> None:
        nonlocal count
        count += 1
        channel = "state" if b"Presence" in packet else "update" if packet[:1] != b"{" and count % 2 else "up"
        del talk.said[:]
        _read_foreign(talk.server, topics.topic(FLEET, "ab"[count % 3 == 0], channel), packet)

    return Target("message to the coordinator", [wire.encode(one) for one in said], JSON, read, weight=20)


def _read_foreign(server: Any, topic: str, packet: bytes) -> None:
    """As the server's loop does, but for what it would blame on the device: that is ours to see."""

    def see(_: str, fault: Exception) -> None:
        raise fault

    assert server.parts.rejected.blame
    server.parts.rejected.blame = see
    server._handle(Received(topic, packet))


def _agent(closing: ExitStack) -> Target:
    talk = AgentTalk(Path(closing.enter_context(tempfile.TemporaryDirectory())))
    closing.callback(talk.close)
    transfer_key, digest = TransferKey("enrolment", "run-1"), digest_of(b"anything")
    said = [
        Offer(transfer_id(transfer_key, "a", digest), digest, 8, transfer_key),
        Offer(
            transfer_id(TransferKey("task", "run-1", 1, 1), "a", digest),
            digest,
            8,
            TransferKey("task", "run-1", 1, 1),
        ),
        wire.Resume(DIGEST, 4),
        wire.Ack(DIGEST, 8),
        wire.Refuse(DIGEST, "no"),
        wire.Lacking("run-1", "no torch"),
        wire.Finish("run-1", "done"),
        wire.Ping("n"),
    ]

    def read(packet: bytes) -> None:
        del talk.said[:]
        agent = talk.agent
        agent._pass(agent._link.hear("down" if packet[:1] == b"{" else "task", packet, 0.0))

    return Target("message to the agent", [wire.encode(one) for one in said], JSON, read, weight=10)
