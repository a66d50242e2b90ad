"""Whole rounds of the methods that make something of its own for each device: whose values go into it, of
which round, and from before or after training.
"""

from dataclasses import replace

import numpy as np
import pytest
from tests.helpers.exact_rounds import DEVICES, PARAMETERS, ROUNDS, SPEC, START, Fleet, mean

from fleetune.protocols.method.critical_parameters import collaborators, mean_and_largest, overlap_ratios
from fleetune.protocols.method.trainer import FitPlan, Pull
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.selection import Layers

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
LAYERS = {name: SPEC.layers[name] for name in ("a", "b")}


# KAPC and BLS


def test_kapc_mixes_each_layer_of_the_latest_models_by_shares_that_took_a_step():
    """Eq. (12) to (15) on what was heard last; `c` took part in round 2 but its update got lost."""
    fleet = Fleet("kapc", {"coaching": 0.5, "equal_sharing": 0.25, "relation_rate": 0.02}, ratio=1.0)
    latest, shares = dict.fromkeys(DEVICES, START), np.full((3, 2, 3), 1 / 3)
    for taking_part, arriving in ROUNDS:
        own = {device: fleet.personal(device) for device in DEVICES}
        fleet.round(taking_part, arriving)
        at = ["abc".index(device) for device in taking_part]
        for layer, where in enumerate(LAYERS.values()):
            w = np.array([latest[device][where] for device in taking_part], float)
            r = shares[np.ix_(at, [layer], at)][:, 0]
            r = r / r.sum(axis=1, keepdims=True)
            step = 2 * 0.5 * (r @ w - w) @ w.T + 0.25 * (r - 1 / len(at))
            r = np.maximum(r - 0.02 * step, 0)
            r /= r.sum(axis=1, keepdims=True)
            for row, device in enumerate(taking_part):
                sent = fleet.tasks[device].patch.apply(START, SPEC)[where]
                np.testing.assert_allclose(sent, r[row] @ w, **CLOSE)
                whole = shares[at[row], layer].copy()
                whole[at] = r[row]
                shares[at[row], layer] = whole / whole.sum()
        np.testing.assert_allclose(fleet.state.cube, shares)
        for device in taking_part:
            target = fleet.tasks[device].patch.apply(own[device], SPEC)
            pull = Pull(target, 0.5, Layers(("a", "b")).mask(SPEC))
            trained = fleet.trainer[device].train(own[device], pull=pull)
            np.testing.assert_allclose(fleet.personal(device), trained, **CLOSE)
        latest.update({device: fleet.personal(device) for device in arriving})


def test_bls_bounds_are_the_largest_ever_seen_after_all_layers_were_sent():
    """Eq. (30), (31): B and tau bound what was seen at any visit, not what was seen last."""
    fleet = Fleet("kapc-bls", {"self_threshold": 1.0}, ratio=1.0)
    fleet.round()
    seen = []
    for scale in (3, 1 / 3, 1):
        device = fleet.device["a"]
        fleet.device["a"] = replace(
            device,
            weights=device.weights * np.float32(scale),
            visit=replace(device.visit, uploaded=2),
        )
        norms, distances = device.visit.norms, device.visit.distances
        before = fleet.device["a"].weights
        fleet.round()
        after, target = fleet.personal("a"), fleet.tasks["a"].patch.apply(before, SPEC)
        now = [np.linalg.norm(after[where]) for where in LAYERS.values()]
        apart = [np.linalg.norm((after - target)[where]) for where in LAYERS.values()]
        assert fleet.device["a"].visit.norms == pytest.approx(np.maximum(norms, now))
        assert fleet.device["a"].visit.distances == pytest.approx(np.maximum(distances, apart))
        assert fleet.device["a"].visit.uploaded == 1
        seen += [np.array(now) > norms, np.array(apart) > distances]
    assert {bool(larger) for pair in seen for larger in pair} == {True, False}


def test_bls_keeps_its_bounds_while_some_layers_stay_at_home():
    fleet = Fleet("kapc-bls", {"self_threshold": 1.0}, ratio=1.0)
    fleet.round()
    first = fleet.device["c"].visit
    assert first.uploaded == 1
    fleet.round()
    assert np.array_equal(fleet.device["c"].visit.norms, first.norms)
    assert np.array_equal(fleet.device["c"].visit.distances, first.distances)


# FedPURIN and FedCAC


def top(scores, tau):
    """Of each tensor the floor(tau * size) highest."""
    mask = np.zeros(SPEC.size, dtype=bool)
    for tensor in SPEC.tensors:
        where = SPEC.slices[tensor.name]
        count = int(tau * tensor.size)
        mask[where.start + np.argsort(-scores[where], kind="stable")[:count]] = count > 0
    return mask


def collaborating(masks, number, beta):
    overlap = overlap_ratios(list(masks.values()))
    chosen = collaborators(overlap, *mean_and_largest(overlap), number, beta)
    return {device: [list(masks)[j] for j in others] for device, others in zip(masks, chosen, strict=True)}


def test_fedpurin_sends_what_is_critical_after_training_and_combines_it():
    fleet, tau, beta = Fleet("fedpurin", {"tau": 0.5, "beta": 2}), 0.5, 2
    shared = Layers(("a", "b")).mask(SPEC)
    model = dict.fromkeys(DEVICES, START)  # what each trains from next
    bar, held = START, {}
    for number, (taking_part, arriving) in enumerate(ROUNDS, start=1):
        fleet.round(taking_part, arriving)
        masks, masked, after = {}, {}, {}
        for device in taking_part:
            trainer = fleet.trainer[device]
            fit = trainer.fit(model[device], FitPlan(keep_last_gradient=True), Key(0))
            masks[device] = (
                top(np.abs(fit.last_gradient * fit.weights), min(tau, DEVICES[device][1])) & shared
            )
            after[device], masked[device] = fit.weights, np.where(masks[device], fit.weights, 0)
            np.testing.assert_allclose(fleet.personal(device), fit.weights, **CLOSE)
            assert np.array_equal(fleet.updates[device].patch.selection.mask(SPEC), masks[device])
        heard = {device: masks[device] for device in arriving}
        held.update(heard)
        bar = np.where(shared, mean([masked[device] for device in arriving], None), START)
        np.testing.assert_allclose(fleet.shared, bar, **CLOSE)
        for device, others in collaborating(heard, number, beta).items():
            delta = mean([masked[device], *(masked[other] for other in others)], None)
            critical = np.where(masks[device], delta if others else after[device], bar)
            model[device] = np.where(shared, critical, after[device]).astype(np.float32)
        for device in set(DEVICES) - set(arriving):  # absent, or its update was lost
            if device in taking_part:  # bar where that says anything, but for what it is thought to have
                kept = np.where(masks[device] | held[device] | (bar == 0), after[device], bar)
            else:
                own = fleet.device[device]
                kept = np.where(own.critical, own.weights, bar)
            personal = fleet.personal(device)
            model[device] = np.where(shared, kept, personal).astype(np.float32)


def test_fedcac_starts_from_the_collaborators_where_critical_and_from_all_elsewhere():
    fleet, tau, beta = Fleet("fedcac", {"tau": 0.25, "beta": 2}), 0.25, 2
    model, heard_of = dict.fromkeys(DEVICES, START), set()
    shared = START
    for number, (taking_part, arriving) in enumerate(ROUNDS, start=1):
        fleet.round(taking_part, arriving)
        after, masks = {}, {}
        for device in taking_part:
            start = fleet.tasks[device].patch.apply(model[device], SPEC)
            if device in heard_of or number == 1:
                np.testing.assert_allclose(start, model[device], **CLOSE)
            after[device] = fleet.trainer[device].train(start)
            masks[device] = top(np.abs(after[device] * (after[device] - start)), tau)
            np.testing.assert_allclose(fleet.personal(device), after[device], **CLOSE)
            sent = fleet.updates[device].critical
            assert np.array_equal(sent, masks[device][: SPEC.num_parameters])
        here = {device: masks[device] for device in arriving}
        shared = np.where(PARAMETERS, mean([after[device] for device in arriving], None), START)
        np.testing.assert_allclose(fleet.shared, shared, **CLOSE)
        for device, others in collaborating(here, number, beta).items():
            with_others = mean([after[device], *(after[other] for other in others)], None)
            start = np.where(masks[device], with_others if others else after[device], shared)
            model[device] = np.where(PARAMETERS, start, after[device]).astype(np.float32)
        for device in set(DEVICES) - set(arriving):
            heard_of.discard(device)
            model[device] = fleet.personal(device)
        heard_of |= set(arriving)


# DC-PFL

CURIOUS = {"start_rounds": 2, "window": 1, "observe": 1, "hold_rounds": 1}


def test_dc_pfl_reports_the_loss_before_training_and_in_a_trial_both_after_it():
    fleet, trials, adopted = Fleet("dc-pfl", CURIOUS), 0, 0
    for _ in range(14):
        kept = dict(fleet.device)
        fleet.round()
        for device, task in fleet.tasks.items():
            trainer, update = fleet.trainer[device], fleet.updates[device]
            own = kept[device].rival if task.adopt else kept[device].weights
            start = task.patch.apply(own, SPEC)
            after = trainer.train(start)
            assert update.loss == pytest.approx(trainer.loss(start))
            assert update.num_samples == DEVICES[device][0]
            np.testing.assert_allclose(fleet.personal(device), after, **CLOSE)
            adopted += task.adopt
            if task.trial is None:
                assert update.trial is None
                sent = task.upload.mask(SPEC)
                assert update.patch.selection == task.upload
                np.testing.assert_allclose(update.patch.values, after[sent], **CLOSE)
            else:
                rival = trainer.train(task.trial.apply(own, SPEC))
                assert update.trial == pytest.approx((trainer.loss(after), trainer.loss(rival)))
                np.testing.assert_allclose(fleet.device[device].rival, rival, **CLOSE)
                assert update.patch.values.size == 0
                trials += 1
    assert trials
    assert adopted


def test_dc_pfls_curve_is_the_mean_of_every_devices_latest_loss_and_groups_count_by_samples():
    fleet, losses, curve = Fleet("dc-pfl", {"start_rounds": 3}), {}, []
    for taking_part, arriving in ROUNDS:
        fleet.round(taking_part, arriving)
        losses.update({device: fleet.updates[device].loss for device in arriving})
        curve.append(np.mean(list(losses.values())))
        assert fleet.state.curve == pytest.approx(curve)
        weights = [DEVICES[device][0] for device in arriving]
        expected = mean([fleet.personal(device) for device in arriving], weights)
        b_only_small = Layers(("b",)).mask(SPEC)  # a and c afford the smaller layers only
        np.testing.assert_allclose(fleet.shared[b_only_small], expected[b_only_small], **CLOSE)
