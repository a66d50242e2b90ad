"""Runs all checks of `edge-agent doctor`, one after another."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fleetune.edge_agent.budget.owner_policy import Policy, limits_of, read_policy
from fleetune.edge_agent.datasets.source_options import name_list
from fleetune.edge_agent.doctor import agent_state, broker, host, sensors, training
from fleetune.edge_agent.doctor.check_result import CheckResult, refused, run_check
from fleetune.edge_agent.probes.board_identity import board_name
from fleetune.edge_agent.probes.board_profile import board_named
from fleetune.edge_agent.probes.conditions import read_conditions
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.edge_agent.state.state_folder import check_format
from fleetune.edge_agent.stream.sample_stream import is_stream
from fleetune.edge_agent.training.trainers import AUTO
from fleetune.firmware_profiles import UNKNOWN, Board, load
from fleetune.protocols.errors import FleetuneError
from fleetune.protocols.settings.section import PROCESSOR
from fleetune.protocols.wire.transport.mqtt import Broker


@dataclass(frozen=True)
class AgentUnderDiagnosis:
    """The options of the agent under diagnosis; checks of options that are not given are skipped.

    Attributes:
        fleet, device, broker, data, state, board, policy, test_fraction, label_column, trainer, train_on,
            root: options of `edge-agent run`. `state` is the value of --state, and `broker` includes the TLS
            files.
        limits: options that take precedence over the policy file.
        problem: the error in the value of --broker; `broker` is then None.
        state_problem: the error that keeps the state's device from being found; `device` is then None.
    """

    device: str | None
    fleet: str | None = None
    broker: Broker | None = None
    data: str | None = None
    state: Path = Path("agent-state")
    board: str = "auto"
    policy: Path | None = None
    limits: dict[str, Any] = field(default_factory=dict)
    test_fraction: float = 0.3
    label_column: str = "label"
    trainer: str = AUTO
    train_on: str = PROCESSOR
    root: Path = Path("/")
    problem: FleetuneError | None = None
    state_problem: FleetuneError | None = None


def examine(agent: AgentUnderDiagnosis) -> Iterator[CheckResult]:
    """Yield the results of all checks. If one check raises an error, the others still run."""
    tls = agent.broker is not None and agent.broker.tls
    yield from run_check("python", host.python)
    yield from run_check("clock", partial(host.clock, agent.root, matters=tls))
    yield from run_check("sensors", partial(_board, agent))
    yield from run_check("state", partial(_state, agent))
    yield from run_check("data", partial(_data, agent))
    yield from run_check("broker", partial(_broker, agent))


def _board(agent: AgentUnderDiagnosis) -> Iterator[CheckResult]:
    """Check board, policy, sensors and trainer.

    If profile or policy is wrong, the checks that need it use the default.
    """
    board, policy = load(UNKNOWN), Policy()
    name = board_name(agent.root) if agent.board == "auto" else agent.board
    try:
        board = board_named(name)
        yield CheckResult("ok", "board", f"{board.title} ({board.name})")
    except FleetuneError as problem:
        yield refused("board", problem)
    try:
        policy = read_policy(agent.policy, agent.limits)
    except FleetuneError as problem:
        yield refused("policy", problem)
    yield from run_check("sensors", partial(sensors.examine, agent.root, policy, board))
    yield from run_check("trainer", partial(_trainer, agent, policy, board))


def _trainer(agent: AgentUnderDiagnosis, policy: Policy, board: Board) -> Iterator[CheckResult]:
    usable = limits_of(None, read_conditions(agent.root), policy, board).memory_bytes
    yield from training.trainers(agent.trainer, usable, train_on=agent.train_on)


def _store(agent: AgentUnderDiagnosis) -> AgentStore | None:
    """Return this device's state folder in the fleet; None if no fleet is given, or the device is unknown."""
    if agent.fleet is None or agent.device is None:
        return None
    return AgentStore(agent.state / agent.fleet / agent.device)


def _state(agent: AgentUnderDiagnosis) -> Iterator[CheckResult]:
    if agent.state_problem is not None:
        raise agent.state_problem
    store = _store(agent)
    if store is None:
        yield CheckResult("skip", "state", "--fleet is not given")
        return
    check_format(store.folder)
    yield from run_check("state folder", partial(agent_state.folder, store))
    yield from run_check("other agent", partial(agent_state.in_use, store))
    yield from run_check("runs", partial(agent_state.runs, store, store.device))
    yield from run_check("disk", lambda: agent_state.room(store, agent_state.latest_enrolment(store)))
    yield from run_check("forecast", lambda: training.latest_run(store, read_conditions(agent.root)))


def _data(agent: AgentUnderDiagnosis) -> Iterator[CheckResult]:
    if agent.data is None:
        yield CheckResult("skip", "data", "--data is not given")
        return
    store = _store(agent)
    if is_stream(agent.data):
        path, labels = None if store is None else store.samples, tuple(name_list(agent.label_column))
        yield from training.stream(agent.data, path, agent.test_fraction, labels)
        return
    enrolment = None if store is None else agent_state.latest_enrolment(store)
    yield from training.data(agent.data, agent.test_fraction, enrolment)


def _broker(agent: AgentUnderDiagnosis) -> Iterator[CheckResult]:
    if agent.problem is not None:
        raise agent.problem
    if agent.broker is None:
        yield CheckResult("skip", "broker", "--broker is not given, and this device has joined no such fleet")
        return
    yield from broker.examine(agent.broker, agent.fleet, agent.device)
