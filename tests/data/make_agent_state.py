"""Make the state folder of an agent, with the code of whatever release stands first in PYTHONPATH.

    git archive COMMIT | tar x -C /tmp/old
    PYTHONPATH=/tmp/old/src:/tmp/old python tests/data/make_agent_state.py tests/data/agent-COMMIT.tar.xz

It holds a run of every method, two rounds old, and beside the folder what that release did next: the model
that the device had, the task of round 3 and the reply to it.
"""

import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
from msgspec import structs
from tests.conftest import PullToTarget, tiny_spec

from fleetune.edge_agent.budget.cost_forecast import Capability
from fleetune.edge_agent.budget.owner_policy import Policy
from fleetune.edge_agent.budget.ratio_controller import RatioController
from fleetune.edge_agent.run.session import Session
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.firmware_profiles import load
from fleetune.protocols.conditions import Conditions
from fleetune.protocols.method.choice import Budget, Choice, Cost, DeviceReport
from fleetune.protocols.method.method import Round
from fleetune.protocols.methods import REGISTRY, create
from fleetune.protocols.randomness import Key
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.update import codec
from fleetune.protocols.wire.payloads import Assignment, Enrolment, Reply, run_key

SPEC, DEVICE = tiny_spec(), "pi"
CHOICES = [Choice(p / 10, Cost(bytes_down=p * 100_000, bytes_up=p * 100_000)) for p in (5, 10)]


def main(archive: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        store = AgentStore(root / "state" / "fleet" / DEVICE)
        store.claim().close()
        for name in REGISTRY:
            play(name, store, root)
        keep_others(store)
        with tarfile.open(archive, "w:xz") as tar:
            tar.add(root, ".", filter=nobodys)


def nobodys(member: tarfile.TarInfo) -> tarfile.TarInfo:
    return member.replace(uid=0, gid=0, uname="", gname="", mtime=0, deep=False)


def play(name: str, store: AgentStore, root: Path) -> None:
    weights = Key.of("weights").uniform(SPEC.size).astype(np.float32) - np.float32(0.5)
    enrolment = Enrolment(
        name, 0, SPEC, {"name": name}, TrainingSection(), 0.0, 1.0, 0.0, 600.0, 1e3, 1e3, weights
    )
    store.enrolment(name).write(codec.encode(enrolment, SPEC))
    method = create(name, SPEC, {})
    session = Session(enrolment, DEVICE, method, PullToTarget(SPEC, DEVICE), store.session(name))
    state = method.admit(method.init_coordinator(weights), DeviceReport(DEVICE, num_samples=10, ratio=0.5))
    reply = b""
    for number in (1, 2, 3):
        state, tasks = method.plan(state, Round(number, (DEVICE,)), run_key(0).child("plan", number, 1))
        task = codec.encode(Assignment(DEVICE, number, 1, False, tasks[DEVICE]), SPEC)
        if number == 3:
            note(root, name, task=task, model=session.personal_model.tobytes(), last=reply)
            kept = store.session(name).read()
            note(root, name, reply=session.reply(task, Budget(0.5)))
            store.session(name).write(kept)
            return
        reply = session.reply(task, Budget(0.5))
        read = codec.decode(reply, Reply[method.update_type], SPEC)
        state = method.aggregate(state, iter([(DEVICE, read.update)]))


def note(root: Path, run: str, **parts: bytes) -> None:
    for name, content in parts.items():
        path = root / "next" / run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def keep_others(store: AgentStore) -> None:
    capability = Capability(100, 2, 16, 10**6, 5e4, 10, 50.0, 2e6, 1e7, 0.04, 2 * 10**8, 2.0, 5.0, 3.0)
    report = DeviceReport(DEVICE, num_samples=100)
    chosen = RatioController(CHOICES, capability, load("raspberry-pi-4b"), Policy(), 20.0, report)
    known = chosen.chosen(Conditions()).learned(
        Budget(0.5), RoundCost(500_000, 500_000, 1.0, 3.0, 2.0, 3 * 10**8)
    )
    store.ratio_controller("fedavg").write(known.chosen(Conditions()).encoded())
    store.ratio_controller("fedprox").write(
        structs.replace(known, deadline_s=0.1).chosen(Conditions()).encoded()
    )
    store.keep_bundle("fedavg", b"some bundle")
    store.keep_task("fedavg", "1" * 32, b"some task")
    part = store.incoming / f"{'2' * 32}.part"
    part.parent.mkdir()
    part.write_bytes(b"a part")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
