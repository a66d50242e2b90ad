"""Everything that an agent needs is looked at before it joins a fleet, one thing after another."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fleetune.edge_agent.budget.owner_policy import Policy, read_policy
from fleetune.edge_agent.doctor import agent_state, broker, host, sensors, stream, training
from fleetune.edge_agent.doctor.finding import Finding, fenced, refused
from fleetune.edge_agent.probes.board_identity import board_name
from fleetune.edge_agent.probes.board_profile import board_named
from fleetune.edge_agent.probes.conditions import read_conditions
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.edge_agent.stream.sample_stream import is_stream
from fleetune.edge_agent.training.trainers import AUTO
from fleetune.firmware_profiles import UNKNOWN, Board, load
from fleetune.protocols.errors import FleetuneError
from fleetune.protocols.settings.section import PROCESSOR
from fleetune.protocols.wire.transport.mqtt import Broker


@dataclass(frozen=True)
class Patient:
    """The agent that is examined, as it would be started; None: an option was not given, so that part is not
    looked at.

    Attributes:
        fleet, device, broker, data, state, board, policy, test_fraction, trainer, train_on, root: options
            of `edge-agent run`; `state` is what --state says, `broker` has the TLS files too.
        limits: options that go on top of the policy.
        problem: why there is no `broker` although one was asked for.
    """

    device: str
    fleet: str | None = None
    broker: Broker | None = None
    data: str | None = None
    state: Path = Path("agent-state")
    board: str = "auto"
    policy: Path | None = None
    limits: dict[str, Any] = field(default_factory=dict)
    test_fraction: float = 0.3
    trainer: str = AUTO
    train_on: str = PROCESSOR
    root: Path = Path("/")
    problem: FleetuneError | None = None


def examine(patient: Patient) -> Iterator[Finding]:
    """Look at one thing after another; whatever one check raises, the others are made."""
    tls = patient.broker is not None and patient.broker.tls
    yield from fenced("python", host.python)
    yield from fenced("clock", partial(host.clock, patient.root, matters=tls))
    yield from fenced("sensors", partial(_board, patient))
    yield from fenced("state", partial(_state, patient))
    yield from fenced("data", partial(_data, patient))
    yield from fenced("broker", partial(_broker, patient))


def _board(patient: Patient) -> Iterator[Finding]:
    """Check board, policy, sensors and trainer. Where profile or policy is wrong, the others go on without
    it.
    """
    board, policy = load(UNKNOWN), Policy()
    name = board_name(patient.root) if patient.board == "auto" else patient.board
    try:
        board = board_named(name)
        yield Finding("ok", "board", f"{board.title} ({board.name})")
    except FleetuneError as problem:
        yield refused("board", problem)
    try:
        policy = read_policy(patient.policy, patient.limits)
    except FleetuneError as problem:
        yield refused("policy", problem)
    yield from fenced("sensors", partial(sensors.examine, patient.root, policy, board))
    yield from fenced("trainer", partial(_trainer, patient, policy, board))


def _trainer(patient: Patient, policy: Policy, board: Board) -> Iterator[Finding]:
    usable = training.limit_bytes(read_conditions(patient.root), policy, board)
    yield from training.trainers(patient.trainer, usable, train_on=patient.train_on)


def _store(patient: Patient) -> AgentStore | None:
    """The state folder of this device in this fleet."""
    return None if patient.fleet is None else AgentStore(patient.state / patient.fleet / patient.device)


def _state(patient: Patient) -> Iterator[Finding]:
    store = _store(patient)
    if store is None:
        yield Finding("skip", "state", "no --fleet given")
        return
    yield from fenced("state folder", partial(agent_state.folder, store))
    yield from fenced("other agent", partial(agent_state.in_use, store))
    yield from fenced("runs", partial(agent_state.runs, store, patient.device))
    yield from fenced("disk", lambda: agent_state.room(store, agent_state.latest_enrolment(store)))
    yield from fenced("forecast", lambda: training.latest_run(store, read_conditions(patient.root)))


def _data(patient: Patient) -> Iterator[Finding]:
    if patient.data is None:
        yield Finding("skip", "data", "no --data given")
        return
    store = _store(patient)
    if is_stream(patient.data):
        yield from stream.data(patient.data, None if store is None else store.samples, patient.test_fraction)
        return
    enrolment = None if store is None else agent_state.latest_enrolment(store)
    yield from training.data(patient.data, patient.test_fraction, enrolment)


def _broker(patient: Patient) -> Iterator[Finding]:
    if patient.problem is not None:
        raise patient.problem
    if patient.broker is None:
        yield Finding("skip", "broker", "no --broker given")
        return
    yield from broker.examine(patient.broker, patient.fleet, patient.device)
