"""Whole rounds of real methods on a fleet whose local training can be checked by hand.

In every epoch, `Exact` moves a quarter of the gradient of ||w - target||^2 / 2, for every key. All numbers
are small. `Fleet` runs rounds with three devices of different data, sample counts and ratios. In the second
round one device is absent, and another one's update is lost.
"""

import numpy as np
from tests.conftest import tiny_spec

from fleetune.protocols.method.choice import Budget, DeviceReport
from fleetune.protocols.method.method import Round
from fleetune.protocols.method.trainer import Fit, FitPlan
from fleetune.protocols.methods import create
from fleetune.protocols.model.loss_terms import Contrast
from fleetune.protocols.randomness import Key
from fleetune.protocols.wire.payloads import run_key, work_key

SPEC = tiny_spec(40)
DEVICES = {"a": (1, 0.5), "b": (2, 1.0), "c": (5, 0.5)}  # training samples and ratio of each device
# participants of each round, and the devices whose updates arrive
ROUNDS = (("abc", "abc"), ("ac", "a"), ("abc", "abc"))
RUN_EPOCHS = 2
START = Key.of("start").uniform(SPEC.size).astype(np.float32) - np.float32(0.5)
PARAMETERS = np.arange(SPEC.size) < SPEC.num_parameters


class Exact:
    """A trainer. Each fit halves the running statistics and adds the device's own number."""

    spec = SPEC
    num_classes_held = 2
    num_test = 1

    def __init__(self, name):
        self.num_samples = DEVICES[name][0]
        self.targets = {
            part: Key.of(part, name).uniform(SPEC.size).astype(np.float32) for part in ("train", "validation")
        }
        self.own_number = np.float32(ord(name) - 96)

    def fit(self, weights, plan, key):
        w, gradient = weights.copy(), None
        for _ in range(RUN_EPOCHS if plan.epochs is None else plan.epochs):
            gradient = self.gradient(w)
            step = np.where(PARAMETERS, (gradient + _extra(w, plan)) / np.float32(4), np.float32(0))
            w = w - (step if plan.trainable is None else np.where(plan.trainable, step, np.float32(0)))
        w[~PARAMETERS] = w[~PARAMETERS] / 2 + self.own_number
        return Fit(w, 0.0, 1, gradient if plan.keep_last_gradient else None)

    def train(self, weights, **plan):
        """The weights at the end of `fit`."""
        return self.fit(np.asarray(weights, np.float32), FitPlan(**plan), Key(0)).weights

    def loss(self, weights, part="train", rows=None):
        return float(np.mean(np.square(weights - self.targets[part], dtype=np.float64)[PARAMETERS]))

    def accuracy(self, weights, part):
        return 1 / (1 + self.loss(weights, part))

    def gradient(self, weights, rows=None):
        """Gradient at `weights`. A batch's target is the row's number times the target of all samples."""
        scale = np.float32(1 if rows is None else rows[0])
        return np.where(PARAMETERS, weights - scale * self.targets["train"], np.float32(0))

    def batches(self, key):
        return [np.array([number]) for number in (0, 1, 2, 3, 4)] * RUN_EPOCHS


def _extra(w, plan):
    """Gradient of a pull and of an extra loss term; here a loss term acts on the weights themselves."""
    total = np.zeros_like(w)
    if plan.pull is not None:
        mask = True if plan.pull.mask is None else plan.pull.mask
        total += np.where(mask, np.float32(2 * plan.pull.strength) * (w - plan.pull.target), np.float32(0))
    if isinstance(plan.loss_term, Contrast):
        away = (w - plan.loss_term.near) - (w - plan.loss_term.far) / np.float32(2)
        total += np.float32(plan.loss_term.strength / plan.loss_term.temperature) * away
    elif plan.loss_term is not None:
        total += np.float32(plan.loss_term.strength / plan.loss_term.temperature) * (
            w - plan.loss_term.teacher
        )
    return total


class Fleet:
    """Devices and coordinator of a method.

    `tasks` and `updates` are those of the last round; `device` and `state` persist. With `ratio` all devices
    use that ratio instead of their own.
    """

    def __init__(self, name, settings=None, devices="abc", ratio=None):
        self.method = create(name, SPEC, settings or {})
        self.state = self.method.init_coordinator(START)
        for device in devices:
            samples, own_ratio = DEVICES[device]
            report = DeviceReport(device, num_samples=samples, ratio=own_ratio if ratio is None else ratio)
            self.state = self.method.admit(self.state, report)
        self.device = {device: self.method.init_device(START) for device in devices}
        self.trainer = {device: Exact(device) for device in devices}
        self.number = 0

    def round(self, taking_part="abc", arriving="abc"):
        self.number += 1
        key = run_key(0).child("plan", self.number, 1)
        self.state, tasks = self.method.plan(self.state, Round(self.number, tuple(taking_part)), key)
        self.tasks, self.updates = dict(tasks), {}
        for name in taking_part:
            self.device[name], self.updates[name] = self.method.work(
                self.device[name],
                self.tasks[name],
                self.trainer[name],
                Budget(),
                work_key(0, self.number, 1, name),
            )
        self.state = self.method.aggregate(self.state, [(name, self.updates[name]) for name in arriving])

    @property
    def shared(self):
        return self.method.shared_model(self.state)

    def personal(self, name):
        return self.method.personal_model(self.device[name])


def mean(models, weights):
    """Weighted mean of each entry, in float64."""
    return np.average(np.asarray(models, np.float64), axis=0, weights=weights)


def covered(previous, sent):
    """Mean of each entry over the devices that sent it; `sent`: (model, mask, samples) of each device."""
    top = sum(n * np.where(mask, model.astype(np.float64), 0) for model, mask, n in sent)
    bottom = sum(n * mask.astype(np.float64) for _, mask, n in sent)
    return np.where(bottom > 0, top / np.where(bottom > 0, bottom, 1), previous)
