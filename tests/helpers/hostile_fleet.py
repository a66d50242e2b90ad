"""Hostile devices in a simulated fleet: the worker forges the outgoing replies of some devices.

A forger takes a device's `Reply` and the method. It returns a `Reply`, or bytes.
"""

from collections import Counter
from dataclasses import replace

import numpy as np

from fleetune.protocols.update import codec
from fleetune.protocols.update.patch import patches_in
from fleetune.protocols.wire.payloads import Reply
from fleetune.tools.simulator.workers import worker

LOST = "lost"  # kinds that change a device's state, not its reply
OLDER = "older"
SILENT_S = 1e7  # seconds for which a silent device works


def _with_values(reply, change):
    for patch in patches_in(reply.update):
        object.__setattr__(patch, "values", change(patch.values).astype(np.float32))
    return reply


def _random(reply):
    noise = np.random.default_rng(reply.round)
    return _with_values(reply, lambda values: noise.normal(size=values.shape))


def _overclaimed(reply):
    return replace(reply, measures=replace(reply.measures, num_samples=10**6))


FORGERS = {
    "random": _random,
    "too large": lambda reply: _with_values(reply, lambda values: np.full_like(values, 1e9)),
    "not finite": lambda reply: _with_values(reply, lambda values: values * np.nan),
    "stale base": lambda reply: replace(reply, base="0" * 32),
    "wrong round": lambda reply: replace(reply, round=reply.round + 1),
    "wrong device": lambda reply: replace(reply, device="somebody"),
    "without update": lambda reply: replace(reply, update=None),
    "overclaimed": _overclaimed,
    "damaged": lambda reply: reply,
}


def forged(reply, kind, method, spec):
    """The encoded reply that a device of this kind sends."""
    honest = codec.decode(reply, Reply[method.update_type], spec)
    data = codec.encode(FORGERS[kind](honest), spec)
    return data[:-9] if kind == "damaged" else data


class HostileFleet:
    """Forge replies by `kind_of(job)`, and count how often each device gets each task.

    Runs use `[encoding] up = "raw"`, so that a reply can be decoded and encoded again without its base.
    """

    def __init__(self, monkeypatch, kind_of):
        self.tasks = Counter()
        self.forged = Counter()
        self._kind_of, self._reply, self._states = kind_of, worker.train, {}
        monkeypatch.setattr(worker, "train", self.reply)

    @property
    def most_of_a_task(self):
        """The highest number of times that one device got one task."""
        return max(self.tasks.values())

    def reply(self, job):
        self.tasks[job.name, *job.key.round_attempt] += 1
        kind = self._kind_of(job)
        if kind in (LOST, OLDER):
            self._change_state(job, kind)
        self._remember_state(job)
        worked = self._reply(job)
        if kind not in FORGERS or worked.reply is None:
            return worked
        self.forged[kind] += 1
        stage = worker._here()
        return replace(
            worked, reply=forged(worked.reply, kind, stage.method, stage.enrolment.spec), sent=None
        )

    def _state_file(self, job):
        return worker._here().folder / f"{job.name}.state"

    def _remember_state(self, job):
        file = self._state_file(job)
        if file.exists():
            self._states.setdefault(job.name, file.read_bytes())

    def _change_state(self, job, kind):
        first = self.tasks[job.name, *job.key.round_attempt] == 1
        if first:
            self.forged[kind] += 1
        if first and (kind == LOST or job.name not in self._states):
            self._state_file(job).unlink(missing_ok=True)
        elif first:
            self._state_file(job).write_bytes(self._states[job.name])
