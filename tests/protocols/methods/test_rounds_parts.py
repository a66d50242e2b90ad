"""Whole rounds of the methods that send parts of a model: who sends what, and what becomes of it."""

import numpy as np
import pytest
from tests.helpers.exact_rounds import DEVICES, PARAMETERS, ROUNDS, SPEC, START, Fleet, covered

from fleetune.protocols.methods.fedspu import FedSPU
from fleetune.protocols.update.selection import Layers, Neurons

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
HIDDEN = SPEC.groups[0]


def part_of(neurons):
    """The entries of a sub-model, straight from the shapes: neurons are rows of `a`, and columns of `b`."""
    outer = np.ones(3, dtype=bool)
    pieces = [
        np.repeat(neurons, 4),
        neurons,
        neurons,
        np.outer(outer, neurons).ravel(),
        outer,
        np.zeros_like(neurons),
    ]
    return np.concatenate(pieces)


def samples(device):
    return DEVICES[device][0]


# FedSPU


def test_fedspu_trains_and_averages_each_devices_own_draw():
    fleet, shared, own = Fleet("fedspu"), START, dict.fromkeys(DEVICES, START)
    for taking_part, arriving in ROUNDS:
        fleet.round(taking_part, arriving)
        sent = {}
        for device in taking_part:
            mask = fleet.tasks[device].patch.selection.mask(SPEC)
            own[device] = fleet.trainer[device].train(np.where(mask, shared, own[device]), trainable=mask)
            sent[device] = own[device], mask, samples(device)
            np.testing.assert_allclose(fleet.personal(device), own[device], **CLOSE)
            assert np.array_equal(fleet.updates[device].patch.selection.mask(SPEC), mask)
        shared = covered(shared, [sent[device] for device in arriving]).astype(np.float32)
        np.testing.assert_allclose(fleet.shared, shared, **CLOSE)


def test_fedspu_draws_anew_for_every_device_and_round_at_its_own_ratio():
    fleet, drawn = Fleet("fedspu"), []
    for _ in range(3):
        fleet.round()
        masks = {device: task.patch.selection.mask(SPEC) for device, task in fleet.tasks.items()}
        for device, (_, ratio) in DEVICES.items():
            assert fleet.tasks[device].patch.selection.ratio == ratio
            assert masks[device][: 4 * HIDDEN].sum() == ratio * 4 * HIDDEN
        assert masks["b"][PARAMETERS].all()
        drawn += [masks["a"], masks["c"]]
    assert len({mask.tobytes() for mask in drawn}) == 6, "two devices of one ratio, three rounds"
    assert isinstance(fleet.tasks["a"].patch.selection, Neurons)


def test_fedspus_early_stopping_weighs_training_and_validation_loss_after_training():
    fleet = Fleet("fedspu", {"early_stopping": True, "loss_weight": 0.75})
    before = dict.fromkeys(DEVICES)
    for taking_part, arriving in ROUNDS:
        fleet.round(taking_part, arriving)
        for device in taking_part:
            trainer, personal = fleet.trainer[device], fleet.personal(device)
            expected = 0.75 * trainer.loss(personal) + 0.25 * trainer.loss(personal, "validation")
            assert fleet.device[device].loss == pytest.approx(expected)
            rose = before[device] is not None and expected > before[device]
            assert fleet.method.finished(fleet.device[device]) is rose
            before[device] = expected
    assert fleet.method.needs_validation
    assert not FedSPU(SPEC).needs_validation


def test_fedspus_early_stopping_compares_with_the_devices_own_last_participation():
    fleet = Fleet("fedspu", {"early_stopping": True, "loss_weight": 0.75})
    fleet.round()
    fleet.round("ac", "a")
    assert not fleet.method.finished(fleet.device["c"])
    fleet.trainer["c"].targets["train"] += np.float32(9)  # its data changed
    fleet.round()
    assert [fleet.method.finished(fleet.device[device]) for device in "abc"] == [False, False, True]


# Sub-models


def leftmost(trainer, weights):
    return -np.arange(HIDDEN)


def trained_norm(order):
    def scores(trainer, weights):
        return by_neuron(trainer.train(weights, epochs=1), order)

    return scores


def by_gradient(trainer, weights):
    return by_neuron(trainer.gradient(weights), 2)


def by_neuron(values, order):
    rows = np.abs(values[: 4 * HIDDEN].reshape(HIDDEN, 4)) ** order
    return rows.sum(axis=1) + np.abs(values[4 * HIDDEN : 5 * HIDDEN]) ** order


def strongest(scores, ratio):
    active = np.zeros(HIDDEN, dtype=bool)
    active[np.argsort(-scores, kind="stable")[: int(ratio * HIDDEN)]] = True
    return active


@pytest.mark.parametrize(
    ("name", "scores", "known"),
    [
        ("fjord", leftmost, True),
        ("fedmp", trained_norm(1), False),
        ("hermes", trained_norm(2), False),
        ("prunefl", by_gradient, False),
    ],
)
def test_sub_models_are_chosen_once_trained_alone_and_averaged_where_they_overlap(name, scores, known):
    fleet, shared, own = Fleet(name), START, dict.fromkeys(DEVICES, START)
    part, reported = {}, set()
    for taking_part, arriving in ROUNDS:
        fleet.round(taking_part, arriving)
        sent = {}
        for device in taking_part:
            trainer, ratio = fleet.trainer[device], DEVICES[device][1]
            came = part[device] if device in reported or (known and device in part) else PARAMETERS
            if device not in reported:
                received = np.where(came, shared, own[device]) if not known else None
                part[device] = part_of(strongest(scores(trainer, received), ratio))
            start = np.where(part[device] | ~PARAMETERS, np.where(PARAMETERS, shared, own[device]), 0)
            own[device] = trainer.train(start, trainable=part[device])
            sent[device] = own[device], part[device], samples(device)
            np.testing.assert_allclose(fleet.personal(device), own[device], **CLOSE)
            assert np.array_equal(fleet.updates[device].patch.selection.mask(SPEC), part[device])
            whole = fleet.tasks[device].patch.selection.mask(SPEC).sum() == SPEC.num_parameters
            assert whole == ((device not in reported and not known) or ratio == 1)
        shared = covered(shared, [sent[device] for device in arriving]).astype(np.float32)
        reported |= set(arriving)
        np.testing.assert_allclose(fleet.shared, shared, **CLOSE)


def test_lottery_tickets_are_pruned_from_what_came_and_reset_to_the_start():
    fleet = Fleet("lotteryfl", {"threshold": 0.0, "rate": 0.25, "target": 0.5})
    shared, own = START, dict.fromkeys(DEVICES, START)
    ticket, last = dict.fromkeys(DEVICES, PARAMETERS), dict.fromkeys(DEVICES, PARAMETERS)
    for taking_part, arriving in ROUNDS:
        fleet.round(taking_part, arriving)
        sent = {}
        for device in taking_part:
            came = last[device]
            start = np.where(came, shared, own[device])
            start = np.where(ticket[device] | ~PARAMETERS, start, 0)
            if ticket[device][_weights()].mean() > 0.5:
                ticket[device] = pruned(ticket[device], start, 0.25)
                start = np.where(ticket[device], START, np.where(PARAMETERS, 0, start))
            own[device] = fleet.trainer[device].train(start, trainable=ticket[device])
            sent[device] = own[device], ticket[device], samples(device)
            np.testing.assert_allclose(fleet.personal(device), own[device], **CLOSE)
        shared = covered(shared, [sent[device] for device in arriving]).astype(np.float32)
        last.update({device: ticket[device] for device in arriving})
        np.testing.assert_allclose(fleet.shared, shared, **CLOSE)
    assert ticket["b"].sum() > ticket["a"].sum(), "b was away for a round of pruning"


def _weights():
    kinds = np.repeat([t.kind == "weight" for t in SPEC.tensors], [t.size for t in SPEC.tensors])
    return np.flatnonzero(kinds)


def pruned(ticket, weights, rate):
    """Less the smallest of each layer's weights that are left."""
    kept = ticket.copy()
    for name in ("a.weight", "b.weight"):
        where = SPEC.slices[name]
        left = [i for i in range(where.start, where.stop) if ticket[i]]
        smallest = sorted(left, key=lambda i: abs(weights[i]))[: int(rate * len(left))]
        kept[smallest] = False
    return kept


# SRP-pFed


def smallest_weights(weights, rate):
    """The `rate` of all parameters with the smallest magnitudes; floor(x + 1/2) of them."""
    size = SPEC.num_parameters
    order = np.argsort(np.abs(weights[:size]), kind="stable")
    mask = np.zeros(SPEC.size, dtype=bool)
    mask[order[: int(np.floor(rate * size + 0.5))]] = True
    return mask


def test_srp_pfed_shares_what_was_small_before_training_at_the_rate_of_least_loss():
    fleet = Fleet("srp-pfed", {"draws": 3, "num_rates": 4, "decay": 0.75})
    shared, own, memory = START, {}, np.ones(4)
    for taking_part, arriving in ROUNDS:
        fleet.round(taking_part, arriving)
        sent, losses, tried = {}, [], set()
        for device in taking_part:
            trainer, rates = fleet.trainer[device], fleet.tasks[device].rates
            tried |= set(rates) if device == "b" else set()
            assert max(rates) <= DEVICES[device][1]
            mine = own.get(device, np.where(PARAMETERS, shared, START))
            masks = [smallest_weights(mine, rate) for rate in rates]
            mixed = [np.where(mask, shared, mine) for mask in masks]
            before = [trainer.loss(mixture) for mixture in mixed]
            best = int(np.argmin(before))
            own[device] = trainer.train(mixed[best])
            sent[device] = own[device], masks[best], samples(device)
            assert fleet.updates[device].loss == pytest.approx(before[best])
            np.testing.assert_allclose(fleet.personal(device), own[device], **CLOSE)
            assert np.array_equal(fleet.updates[device].patch.selection.mask(SPEC), masks[best])
            losses += [before[best]] if device in arriving else []
        shared = covered(shared, [sent[device] for device in arriving]).astype(np.float32)
        np.testing.assert_allclose(fleet.shared, shared, **CLOSE)
        memory = fleet_memory(memory, fleet, tried, losses)
        assert fleet.state.memory == pytest.approx(memory)


def fleet_memory(memory, fleet, tried, losses):
    """h <- 0.75 h + (1 - sigmoid(mean loss)) on the rates drawn; b can afford all that are."""
    if not tried:  # b was away: any rate may have been drawn
        return fleet.state.memory
    gain = 1 - 1 / (1 + np.exp(-np.mean(losses)))
    drawn = np.isin(np.arange(1, 5) / 4, list(tried))
    return 0.75 * memory + np.where(drawn, gain, 0)


# PerFedMask


def test_perfedmask_trains_its_layers_beside_a_fine_tuned_model():
    fleet = Fleet("perfedmask", {"fine_tuning_epochs": 3})
    body, head = Layers(("a", "n")).mask(SPEC), Layers(("b",)).mask(SPEC)
    shared, own = START, dict.fromkeys(DEVICES, START)
    for taking_part, arriving in ROUNDS:
        fleet.round(taking_part, arriving)
        sent = {}
        for device in taking_part:
            trainer, layers = fleet.trainer[device], fleet.tasks[device].trained.mask(SPEC)
            start = np.where(head, START, np.where(body, shared, own[device]))
            model = trainer.train(start, trainable=layers)
            own[device] = trainer.train(start, epochs=3)
            sent[device] = model, layers, samples(device)
            np.testing.assert_allclose(fleet.personal(device), own[device], **CLOSE)
        shared = covered(shared, [sent[device] for device in arriving]).astype(np.float32)
        np.testing.assert_allclose(fleet.shared, shared, **CLOSE)
