"""A fleet whose power fails, whenever it hurts: the run ends as without.

    python -m tests.power_cuts --count 100 --seed 0

The real server, stores, links and sessions, in one process and without a clock. What a device
writes, and what arrives at the coordinator, goes to a disk that forgets what was not synced
(tests/helpers/power.py). SQLite has its own files: they are kept as they are at the moment of the cut, which
falls before or after any commit; what SQLite itself syncs is not looked into here. One seed gives one course
of events.
"""

import argparse
import dataclasses
import logging
import shutil
import sys
import tempfile
from collections import deque
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from tests.conftest import PullToTarget
from tests.helpers.power import ForgetfulDisk, PowerCut
from tests.helpers.talk import SPEC, Coordinating, run_settings

from fleetune.coordinator.serving.event_queue import TimerDue
from fleetune.edge_agent.run.intake import Intake
from fleetune.edge_agent.run.session import Session
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.protocols.method.choice import Budget, DeviceReport
from fleetune.protocols.methods import REGISTRY, from_section
from fleetune.protocols.wire import messages as wire
from fleetune.protocols.wire import topics
from fleetune.protocols.wire.capabilities import EVERYTHING
from fleetune.protocols.wire.inbox import Arrived
from fleetune.protocols.wire.messages import Ack, TransferKey
from fleetune.protocols.wire.outbox import Sent
from fleetune.protocols.wire.payloads import read_enrolment
from fleetune.protocols.wire.peer_link import Answered, Packet, PeerLink

DEVICES = ("a", "b", "c")
CHUNK_BYTES = 300  # a few a payload
METHODS = list(REGISTRY)


class ClientState:
    """What an agent does with what it hears, without its threads; one process after another."""

    def __init__(self, name, folder, power, world):
        self.name, self.power, self.world = name, power, world
        self.store = AgentStore(folder)
        self.session = self.run = None
        with power.in_place():
            self.intake = Intake(
                name,
                self.store,
                joined=lambda: self.run,
                reason_not_to_train=lambda: None,
                clock=lambda: 0.0,
            )
            self.lock = self.store.claim()
        self.link = PeerLink(name, "device", self.intake, max_chunk_bytes=CHUNK_BYTES)

    def hear(self, channel, data):
        with self.power.in_place():
            self._pass(self.link.hear(channel, data, 0.0))

    def tick(self, now):
        with self.power.in_place():
            self._pass(self.link.tick(now))

    def _say(self, packet):
        if not self.power.dark:
            self.world.post.append(("coordinator", self.name, packet.channel, packet.data))

    def _pass(self, items):
        for item in items:
            match item:
                case Packet():
                    self._say(item)
                case Arrived(offer):
                    assert self.intake.keep(item) is None
                    self._say(self.link.accept(item))
                    self._go_on(offer)  # acknowledged by now, as jobs of a real agent come after
                case Answered(offer, Ack()):
                    self._go_on(offer)
                case Sent(transfer_key, None):  # else the coordinator had it, and its word was lost
                    self.world.acknowledged[self.name] = (transfer_key.round, transfer_key.attempt)

    def _go_on(self, offer):
        if offer.transfer_key.kind == "enrolment":
            self._join(offer.transfer_key.run)
        else:
            self._work(offer.transfer_key, offer.transfer)

    def _join(self, run):
        enrolment = read_enrolment(self.store.enrolment(run).read())
        if self.session is None:
            method = from_section(enrolment.method, SPEC)
            trainer = PullToTarget(SPEC, self.name)
            self.session = Session(enrolment, self.name, method, trainer, self.store.session(run))
            report = DeviceReport(self.name, num_samples=10)
            self.report = dataclasses.replace(report, ratio=method.choices(report)[-1].ratio)
            kept = self.session._state
            assert (kept.round, kept.attempt) >= self.world.acknowledged[self.name], (
                "an acknowledged round is lost"
            )
        self.run = run
        self._say(self.link.packet(wire.Ready(run, SPEC.hash, self.report)))
        self._pass(self.link.reconnected(0.0))

    def _work(self, transfer_key, transfer):
        update = TransferKey(
            "update",
            transfer_key.run,
            transfer_key.round,
            transfer_key.attempt,
            transfer_key.final_evaluation,
        )
        payload = self.store.task(transfer_key.run, transfer).read()
        if update in self.link.outbox.keys or payload is None:
            return
        self._pass(self.link.post(update, self.session.reply(payload, Budget(self.report.ratio)), 0.0))


class World:
    """A fleet in one folder. Messages arrive in the order they were sent; a process that starts anew has
    lost those that were on their way to it.

    Args:
        folder: of everything.
        method: its name.
        seed: of when the power goes, and where.
        most: cuts; 0: an undisturbed run.

    Attributes:
        cuts: how many there have been.
    """

    def __init__(self, folder, method, seed=0, most=0):
        self.folder, self.settings = folder, settings_of(method)
        self.rng, self.most, self.cuts, self.starts, self.now = np.random.default_rng(seed), most, 0, 0, 0.0
        self.post, self.acknowledged = deque(), dict.fromkeys(DEVICES, (0, 0))
        self.powers, self.devices = {}, {}
        for name in ("coordinator", *DEVICES):
            root = folder / name / ("incoming" if name == "coordinator" else "")
            root.mkdir(parents=True)
            self.powers[name] = ForgetfulDisk(root, self.rng.integers(2**31))
        self._plan_cut()
        self._survive("coordinator", self._start_coordinator)
        for name in DEVICES:
            self._survive(name, lambda name=name: self._start_device(name))

    def play(self):
        """Until the run is finished; the shared model, personal models and counted bytes."""
        try:
            while self.coordinator.server.finished is None:
                while not self.post:
                    self._wait()
                self._deliver(*self.post.popleft())
            return self._outcome()
        finally:
            self.coordinator.run.store.close()
            for device in self.devices.values():
                device.lock.close()

    def _deliver(self, to, sender, channel, data):
        if to == "coordinator":
            self._survive(to, lambda: self._tell_coordinator(sender, channel, data))
        else:
            self._survive(to, lambda: self.devices[to].hear(channel, data))

    def _wait(self):
        """Nothing is on its way: whoever waits for an answer asks again."""
        self.now += 60.0
        assert self.now < 60 * 1000, "the run does not go on"
        self._survive("coordinator", self._tick_coordinator)
        for name in DEVICES:
            self._survive(name, lambda name=name: self.devices[name].tick(self.now))

    def _tell_coordinator(self, sender, channel, data):
        with self.powers["coordinator"].in_place():
            try:
                self.coordinator.hear(sender, data, channel)
            finally:
                self._collect()

    def _tick_coordinator(self):
        with self.powers["coordinator"].in_place():
            self.coordinator.server._handle_all([TimerDue()])
            self._collect()

    def _collect(self):
        """What the coordinator said before its power went is on its way."""
        for topic, data in self.coordinator.said:
            address = topics.parse(topic)
            self.post.append((address.device, "coordinator", address.channel, data))
        self.coordinator.said.clear()

    def _survive(self, who, action):
        while True:
            with suppress(PowerCut):
                action()
                return
            self.cuts += 1
            self.post = deque(one for one in self.post if one[0] != who)
            if who == "coordinator":
                self._cut_coordinator()
                action = self._start_coordinator
            else:
                self._cut_device(who)
                action = lambda: self._start_device(who)  # noqa: E731 - either is called here
            self._plan_cut()

    def _plan_cut(self):
        for power in self.powers.values():
            power.cut_at = None
        if self.cuts < self.most:
            power = self.powers[self.rng.choice(list(self.powers))]
            power.cut_at = power.count + self.rng.integers(0, 30) / 2

    def _start_device(self, name):
        self.starts += 1
        self.devices[name] = ClientState(name, self.folder / name / "state", self.powers[name], self)
        self._greet(name)

    def _greet(self, name):
        presence = wire.Presence(True, str(self.starts), reads=EVERYTHING)
        self.post.append(("coordinator", name, "state", wire.encode(presence)))

    def _start_coordinator(self):
        with self.powers["coordinator"].in_place():
            self.coordinator = Coordinating.of(self.folder / "coordinator", self.settings)
            self.coordinator.server.timer = lambda: self.now
            self._strike_at_commits(self.coordinator.run.store)
            self._collect()
        for name in self.devices:
            self._greet(name)

    def _strike_at_commits(self, store):
        commit, power = store.step, self.powers["coordinator"]

        @contextmanager
        def step():
            with commit():
                yield
                power.pass_by()
            power.pass_by()

        store.step = step

    def _cut_device(self, name):
        if name in self.devices:
            self.devices[name].lock.close()
        self.powers[name].cut()

    def _cut_coordinator(self):
        """SQLite's files stay as they are now, not as closing them leaves them."""
        folder, kept = self.folder / "coordinator", self.folder / "kept"
        kept.mkdir()
        for file in folder.glob("state.sqlite*"):
            shutil.copy(file, kept / file.name)
        self.coordinator.run.store.close()
        for file in folder.glob("state.sqlite*"):
            file.unlink()
        for file in kept.glob("state.sqlite*"):
            shutil.move(file, folder / file.name)
        kept.rmdir()
        self.powers["coordinator"].cut()

    def _outcome(self):
        run = self.coordinator.run
        traffic = run.controller.ledger.traffic
        return {
            "shared": run.controller.shared_model.tobytes(),
            "personal": {name: one.session.personal_model.tobytes() for name, one in self.devices.items()},
            "traffic": {name: replace(traffic[name], enrolment=0) for name in DEVICES},
            "rounds": [(one.number, one.attempt, sorted(one.devices)) for one in run.store.records()],
        }


def settings_of(method):
    """Rounds wait for everybody and nobody rehearses: a round that begins while a device is away does
    without it, by design.
    """
    settings = run_settings(method, rounds=4, start_with=len(DEVICES), quorum=len(DEVICES))
    return replace(settings, run=replace(settings.run, final_evaluation=False))


def undisturbed(folder, method):
    """What the run comes to when the power never goes."""
    return World(folder, method).play()


def cut(folder, method, seed, most):
    """What it comes to with up to `most` cuts, and how many there were."""
    world = World(folder, method, seed, most)
    return world.play(), world.cuts


def main():
    logging.disable()  # what a process says of packets that came to it without their beginning
    options = argparse.ArgumentParser()
    options.add_argument("--count", type=int, default=100)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--each", type=int, default=5, help="at most so many a run")
    asked = options.parse_args()
    done, runs, failed, wanted = 0, 0, 0, {}
    while done < asked.count:
        method = METHODS[runs % len(METHODS)]
        with tempfile.TemporaryDirectory() as folder:
            if method not in wanted:
                wanted[method] = undisturbed(Path(folder) / "undisturbed", method)
            most = min(asked.each, asked.count - done)
            found, count = cut(Path(folder) / "cut", method, asked.seed + runs, most)
        done, runs = done + count, runs + 1
        if differs := [name for name in found if found[name] != wanted[method][name]]:
            failed += 1
            print(f"{method}, seed {asked.seed + runs - 1}, {count} cuts: another {', '.join(differs)}")
    print(f"{done} power cuts in {runs} runs of {len(METHODS)} methods, {failed} of them not equal")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
