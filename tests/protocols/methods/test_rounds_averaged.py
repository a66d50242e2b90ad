"""Whole rounds of the methods that average one model, against what their papers say in a few lines each.

An oracle is what one device does in a round: from its own state and `put`, which puts the shared entries that
came over a model, to the model that it sends and the personal one.
"""

import numpy as np
import pytest
from tests.helpers.exact_rounds import DEVICES, PARAMETERS, ROUNDS, SPEC, START, Fleet, covered

from fleetune.protocols.method.submodels import cut
from fleetune.protocols.method.trainer import Pull
from fleetune.protocols.methods.cd2_pfed import shared_entries
from fleetune.protocols.model.loss_terms import Contrast, Distillation
from fleetune.protocols.update.selection import Layers

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def mask_of(*layers):
    return Layers(layers).mask(SPEC)


BODY, HEAD = mask_of("a", "n"), mask_of("b")


def plain(trainer, mine, put):
    mine["own"] = trainer.train(put(mine["own"]))
    return mine["own"], mine["own"]


def local_only(trainer, mine, put):
    mine["own"] = trainer.train(mine["own"])
    return mine["own"], mine["own"]


def fedprox(trainer, mine, put):
    start = put(mine["own"])
    mine["own"] = trainer.train(start, pull=Pull(start, 0.25))
    return mine["own"], mine["own"]


def fedrep(trainer, mine, put):
    headed = trainer.train(put(mine["own"]), trainable=HEAD, epochs=3)
    mine["own"] = trainer.train(headed, trainable=BODY, epochs=None)
    return mine["own"], mine["own"]


def fedrep_body(trainer, mine, put):
    headed = trainer.train(put(mine["own"]), trainable=HEAD, epochs=1)
    mine["own"] = trainer.train(headed, trainable=BODY, epochs=4)
    return mine["own"], mine["own"]


def fedbabu(trainer, mine, put):
    start = np.where(HEAD, START, put(mine["own"]))
    mine["own"] = trainer.train(start, trainable=HEAD, epochs=3)
    return trainer.train(start, trainable=BODY), mine["own"]


def fedbabu_all(trainer, mine, put):
    start = np.where(HEAD, START, put(mine["own"]))
    mine["own"] = trainer.train(start, trainable=PARAMETERS, epochs=3)
    return trainer.train(start, trainable=BODY), mine["own"]


def ditto(trainer, mine, put):
    start = put(mine.get("copy", START))
    mine["copy"] = trainer.train(start)
    mine["own"] = trainer.train(mine["own"], pull=Pull(start, 0.75))
    return mine["copy"], mine["own"]


def ditto_epochs(trainer, mine, put):
    start = put(mine.get("copy", START))
    mine["copy"] = trainer.train(start)
    mine["own"] = trainer.train(mine["own"], pull=Pull(start, 0.75), epochs=5)
    return mine["copy"], mine["own"]


def per_fedavg(inner_outer, hessian=None):
    """Steps w <- w - 0.5 * (g - 0.25 * H g), g the outer batch's gradient at w - 0.25 * the inner batch's."""

    def local(trainer, mine, put):
        def target(number):
            return number * trainer.targets["train"].astype(float)

        start = trainer.train(put(mine["own"]), trainable=~PARAMETERS, epochs=1)
        personal, w = start - 0.25 * (start - target(1)), start.astype(float)
        for inner, outer in inner_outer:
            g = w - 0.25 * (w - target(inner)) - target(outer)
            w = w - 0.5 * (g if hessian is None else g - 0.25 * g)
        mine["own"] = np.where(PARAMETERS, personal, start).astype(np.float32)
        return np.where(PARAMETERS, w, start), mine["own"]

    return local


PAIRS = [(0, 1), (2, 3), (4, 0), (1, 2), (3, 4)]  # of batches 0 to 4, twice
TRIPLES = [(0, 1), (3, 4), (1, 2), (4, 0)]  # the third is the Hessian's; the last lacks two


def moon(trainer, mine, put):
    start = put(mine["own"])
    mine["own"] = trainer.train(start, loss_term=Contrast(start, mine["own"], 0.5, 0.25))
    return mine["own"], mine["own"]


def pfedsd(trainer, mine, put):
    teacher = Distillation(mine["own"], 0.5, 2.0) if mine.get("trained") else None
    mine["own"], mine["trained"] = trainer.train(put(mine["own"]), loss_term=teacher), True
    return mine["own"], mine["own"]


def cd2(trainer, mine, put):
    start = put(mine["own"])
    shared = put.mask
    private = PARAMETERS & ~shared
    if private.any():
        for part, teacher in ((shared, private), (private, shared)):
            loss_term = Distillation(cut(start, teacher, SPEC), 0.5 / 2, 2.0)
            taught = trainer.train(cut(start, part, SPEC), trainable=part, loss_term=loss_term, epochs=1)
            start = np.where(part, taught, start)
    mine["own"] = trainer.train(start)
    return mine["own"], mine["own"]


def always(mask):
    return lambda number: mask


def growing(number):
    return shared_entries(SPEC, (0, 0.25, 0.5)[number - 1]).mask(SPEC)


CD2 = {"growth_rounds": 2, "strength": 0.5, "temperature": 2.0}
PER, HESSIAN = (
    {"adaptation_rate": 0.25, "meta_rate": 0.5},
    {"approximation": "hessian-free", "difference": 0.5},
)
METHODS = [  # name, settings, what one device does, what travels, whether by samples
    ("fedavg", {}, plain, always(PARAMETERS), True),
    ("local-only", {}, local_only, always(mask_of()), True),
    ("fedprox", {"proximal": 0.5}, fedprox, always(PARAMETERS), True),
    ("fedper", {}, plain, always(BODY), True),
    ("lg-fed", {}, plain, always(HEAD), True),
    ("fedbn", {}, plain, always(mask_of("a", "b")), False),
    ("fedrep", {"head_epochs": 3}, fedrep, always(BODY), False),
    ("fedrep", {"head_epochs": 1, "body_epochs": 4}, fedrep_body, always(BODY), False),
    ("fedbabu", {"fine_tuning_epochs": 3}, fedbabu, always(BODY), True),
    ("fedbabu", {"fine_tuning_epochs": 3, "fine_tuned": "all"}, fedbabu_all, always(BODY), True),
    ("ditto", {"pull": 1.5}, ditto, always(PARAMETERS), False),
    ("ditto", {"pull": 1.5, "personal_epochs": 5}, ditto_epochs, always(PARAMETERS), False),
    ("per-fedavg", PER, per_fedavg(PAIRS), always(PARAMETERS), False),
    ("per-fedavg", {**PER, **HESSIAN}, per_fedavg(TRIPLES, "counts"), always(PARAMETERS), False),
    ("per-fedavg", {**PER, "steps": 3}, per_fedavg([(1, 1)] * 3), always(PARAMETERS), False),
    ("moon", {"strength": 0.5, "temperature": 0.25}, moon, always(PARAMETERS), True),
    ("pfedsd", {"strength": 0.5, "temperature": 2.0}, pfedsd, always(PARAMETERS), False),
    ("cd2-pfed", CD2, cd2, growing, True),
]


class Put:
    """Puts the shared entries of the coordinator's model over another one."""

    def __init__(self, mask, shared):
        self.mask, self.shared = mask, shared

    def __call__(self, model):
        return np.where(self.mask, self.shared, model).astype(np.float32)


@pytest.mark.parametrize(("name", "settings", "local", "travels", "by_samples"), METHODS)
def test_three_rounds_are_what_the_paper_says(name, settings, local, travels, by_samples):
    fleet = Fleet(name, settings)
    shared, mine = START.astype(np.float64), {device: {"own": START} for device in DEVICES}
    for number, (taking_part, arriving) in enumerate(ROUNDS, start=1):
        fleet.round(taking_part, arriving)
        put, sent = Put(travels(number), shared), {}
        for device in taking_part:
            sent[device], personal = local(fleet.trainer[device], mine[device], put)
            np.testing.assert_allclose(fleet.personal(device), personal, **CLOSE)
            assert fleet.updates[device].num_samples == DEVICES[device][0]
        weights = {device: DEVICES[device][0] if by_samples else 1 for device in arriving}
        shared = covered(shared, [(sent[device], put.mask, weights[device]) for device in arriving])
        np.testing.assert_allclose(fleet.shared, shared, **CLOSE)
