"""Faults at the level of a round, to be planted in the product: ones that an implementation could have.

`FAULTS` maps each to the method whose vectors must notice it, and to what plants it by a monkeypatch.
"""

from dataclasses import replace

import numpy as np

from fleetune.protocols.method import critical_parameters
from fleetune.protocols.method.averaging import equally_weighted
from fleetune.protocols.method.trainer import FitPlan
from fleetune.protocols.methods import fedpurin, fedspu, srp_pfed
from fleetune.protocols.methods.dcpfl import dcpfl, discrepancy, groups, splitting
from fleetune.protocols.methods.kapc import bls, kapc, relationship_cube
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Entries

FAULTS = {}


def fault(method, owner, name):
    """The decorated function stands in for `owner.name`, which it is given first."""

    def planted(instead):
        original = getattr(owner, name)

        def plant(monkeypatch):
            monkeypatch.setattr(owner, name, lambda *args, **kwargs: instead(original, *args, **kwargs))

        FAULTS[f"{method}: {instead.__name__.replace('_', ' ')}"] = method, plant
        return instead

    return planted


class Meddling:
    """A trainer in which something is done to the plan."""

    def __init__(self, trainer, meddle):
        self._trainer, self._meddle = trainer, meddle

    def __getattr__(self, name):
        return getattr(self._trainer, name)

    def fit(self, weights, plan, key):
        return self._trainer.fit(weights, self._meddle(plan), key)


# FedSPU


@fault("fedspu", fedspu.FedSPU, "work")
def a_device_keeps_zeros_where_it_received_nothing(work, method, state, task, *rest):
    return work(method, replace(state, weights=np.zeros_like(state.weights)), task, *rest)


@fault("fedspu", fedspu.FedSPU, "work")
def all_entries_are_trained(work, method, state, task, trainer, *rest):
    return work(method, state, task, Meddling(trainer, lambda plan: FitPlan()), *rest)


@fault("fedspu", fedspu.FedSPU, "work")
def the_loss_of_the_first_participation_is_kept(work, method, state, *rest):
    after, update = work(method, state, *rest)
    return after if state.loss is None else replace(after, loss=state.loss), update


@fault("fedspu", fedspu, "rose")
def a_device_stops_when_its_loss_falls(rose, loss, previous):
    return previous is not None and loss < previous


@fault("fedspu", fedspu, "covered_average")
def the_average_does_not_weigh_samples(average, weights, updates, spec, *combine):
    return average(weights, equally_weighted(updates), spec, *combine)


@fault("fedspu", fedspu, "covered_average")
def full_devices_overwrite_partial_ones(average, weights, updates, spec, *combine):
    updates = list(updates)
    full = [u for u in updates if u[1].patch.selection.count(spec) == spec.num_parameters]
    return average(weights, full or updates, spec, *combine)


@fault("fedspu", fedspu, "covered_average")
def biases_of_partial_devices_take_the_first_channels_value(average, weights, updates, spec, *combine):
    def of_first(patch):
        dense, mask = patch.apply(np.zeros_like(weights), spec), patch.selection.mask(spec)
        for tensor in spec.tensors:
            here = np.flatnonzero(mask[spec.slices[tensor.name]]) + spec.slices[tensor.name].start
            if tensor.kind == "bias" and here.size:
                dense[here] = dense[here[0]]
        return Patch.of(dense, patch.selection, spec)

    return average(weights, [(d, replace(u, patch=of_first(u.patch))) for d, u in updates], spec, *combine)


# SRP-pFed


@fault("srp-pfed", srp_pfed.SRPpFed, "work")
def the_mask_is_taken_anew_after_training(work, method, state, *rest):
    after, update = work(method, state, *rest)
    size = method.spec.num_parameters
    rate = update.patch.selection.count(method.spec) / size
    mask = Entries(srp_pfed.shared_mask(after.weights[:size], rate))
    return after, replace(update, patch=Patch.of(after.weights, mask, method.spec))


@fault("srp-pfed", srp_pfed.SRPpFed, "work")
def the_loss_after_training_is_reported(work, method, state, task, trainer, *rest):
    after, update = work(method, state, task, trainer, *rest)
    return after, replace(update, loss=trainer.loss(after.weights))


@fault("srp-pfed", srp_pfed.SRPpFed, "work")
def a_late_device_starts_from_the_runs_first_model(work, method, state, *rest):
    return work(method, replace(state, trained=True), *rest)


@fault("srp-pfed", srp_pfed, "fuse")
def the_shared_model_is_taken_everywhere(fuse, mask, shared, own):
    return shared


@fault("srp-pfed", srp_pfed, "choose")
def the_first_mixture_is_kept(choose, losses):
    return 0


@fault("srp-pfed", srp_pfed, "reinforce")
def the_memory_does_not_fade(reinforce, memory, drawn, gain, decay):
    return reinforce(memory, drawn, gain, 1.0)


@fault("srp-pfed", srp_pfed, "reinforce")
def only_the_first_rate_is_credited(reinforce, memory, drawn, gain, decay):
    return reinforce(memory, drawn[:1], gain, decay)


@fault("srp-pfed", srp_pfed.SRPpFed, "work")
def rates_are_credited_that_nobody_used(work, method, *rest):
    after, update = work(method, *rest)
    return after, replace(update, rate=None) if method.credit == "used" else update


@fault("srp-pfed", srp_pfed.SRPpFed, "_candidates")
def entries_that_were_not_sent_are_shared(candidates, method, sent):
    return [np.arange(method.spec.num_parameters)]


@fault("srp-pfed", srp_pfed, "probabilities")
def rates_are_drawn_evenly(probabilities, memory):
    return probabilities(np.ones_like(memory))


@fault("srp-pfed", srp_pfed, "merge")
def what_few_devices_send_shrinks(merge, previous, mean, num_samples, how):
    return merge(previous, mean, num_samples, "literal")


# KAPC


@fault("kapc", kapc.KAPC, "aggregate")
def targets_are_of_first_copies(aggregate, method, state, updates, *combine):
    after = aggregate(method, state, updates, *combine)
    return replace(after, latest={**after.latest, **state.latest})


@fault("kapc", kapc.KAPC, "plan")
def the_cube_is_not_written_back(plan, method, state, round_, key):
    known = state.with_devices(round_.participants).related_to_all()
    return replace(plan(method, state, round_, key)[0], cube=known.cube), plan(method, state, round_, key)[1]


@fault("kapc", relationship_cube, "write_back")
def rows_are_not_normalised_when_written_back(write_back, cube, places, part):
    written = cube.copy()
    written[np.ix_(places, range(cube.shape[1]), places)] = part
    return written


@fault("kapc", relationship_cube, "descend")
def the_cube_climbs(descend, cube, grams, *, rate, **rest):
    return descend(cube, grams, rate=-rate, **rest)


@fault("kapc", kapc.KAPC, "work")
def a_device_starts_from_its_target(work, method, state, task, *rest):
    return work(method, replace(state, weights=task.patch.apply(state.weights, method.spec)), task, *rest)


@fault("kapc", kapc.KAPC, "work")
def norm_layers_are_pulled_too(work, method, state, task, trainer, *rest):
    meddling = Meddling(trainer, lambda plan: replace(plan, pull=replace(plan.pull, mask=None)))
    return work(method, state, task, meddling, *rest)


@fault("kapc", relationship_cube, "curvature")
def all_layers_step_alike(curvature, gram, *strengths):
    return 1.0


@fault("kapc", relationship_cube, "project_simplex")
def shares_are_clipped_and_not_projected(project_simplex, cube):
    return relationship_cube.normalise(cube)


@fault("kapc", kapc.KAPC, "work")
def layers_that_are_not_exchanged_are_pulled(work, method, state, task, trainer, budget, key):
    everything = kapc.Layers(tuple(method.layers)).mask(method.spec)
    to_start = Meddling(trainer, lambda plan: replace(plan, pull=replace(plan.pull, mask=everything)))
    return work(method, state, task, to_start, budget, key)


@fault("kapc-bls", kapc.KAPC, "work")
def the_last_visit_is_forgotten(work, method, state, *rest):
    return work(method, replace(state, visit=None), *rest)


@fault("kapc-bls", kapc.KAPC, "work")
def a_layer_that_did_not_come_pulls_to_zero(work, method, state, task, trainer, *rest):
    held = task.patch.selection.mask(method.spec)

    def to_zero(plan):
        target = np.where(held, plan.pull.target, np.float32(0))
        return replace(plan, pull=replace(plan.pull, target=target))

    return work(method, state, task, Meddling(trainer, to_zero), *rest)


@fault("kapc-bls", kapc.KAPC, "aggregate")
def layers_that_did_not_come_go_back_to_the_start(aggregate, method, state, updates, *combine):
    updates = list(updates)
    forgotten = {device: state.initial for device, _ in updates if device in state.latest}
    return aggregate(method, replace(state, latest={**state.latest, **forgotten}), updates, *combine)


@fault("kapc-bls", bls, "self_taught")
def the_first_devices_shares_decide_for_all(self_taught, rows, place, threshold):
    return self_taught(rows, 0, threshold)


@fault("kapc-bls", bls, "bounds")
def distances_are_to_nothing(bounds, weights, targets):
    return bounds(weights, [np.zeros_like(target) for target in targets])


# FedPURIN


@fault("fedpurin", fedpurin.FedPURIN, "aggregate")
def bar_is_over_those_who_sent(aggregate, method, state, updates, *combine):
    return aggregate(replace(method, average="coverage"), state, updates, *combine)


@fault("fedpurin", fedpurin.FedPURIN, "aggregate")
def an_absent_device_gets_its_old_delta(aggregate, method, state, updates, *combine):
    after = aggregate(method, state, updates, *combine)
    old = {device: held for device, held in state.held.items() if after.held[device].number == held.number}
    return replace(after, held={**after.held, **old})


@fault("fedpurin", critical_parameters, "collaborators")
def all_devices_collaborate(collaborators, overlap, mean, largest, number, beta):
    everybody = collaborators(overlap, -np.inf, -np.inf, 0, beta)
    return everybody if number <= beta else collaborators(overlap, mean, largest, number, beta)


@fault("fedpurin", critical_parameters, "collaborators")
def the_threshold_does_not_rise(collaborators, overlap, mean, largest, number, beta):
    return collaborators(overlap, mean, mean, number, beta)


@fault("fedpurin", fedpurin, "collaborated_models")
def collaboration_never_ends(collaborated_models, masks, models, number, beta):
    return collaborated_models(masks, models, min(number, beta), beta)


@fault("fedpurin", critical_parameters, "critical_mask")
def ties_are_out(critical_mask, scores, tau, **rest):
    highest = np.argsort(-scores.ravel(), kind="stable")[: int(tau * scores.size)]
    return critical_mask(scores, tau, **rest) & np.isin(np.arange(scores.size), highest).reshape(scores.shape)


@fault("fedpurin", fedpurin, "perturbation")
def large_weights_are_critical_whatever_their_gradient(perturbation, weights, gradient, **rest):
    return perturbation(weights, weights, **rest)


@fault("fedpurin", fedpurin.FedPURIN, "combined_model")
def bar_is_zero_where_it_was_not_sent(combined_model, method, *rest):
    return combined_model(replace(method, downlink="whole"), *rest)


def norm_layers_are_shared(monkeypatch):
    monkeypatch.setattr(fedpurin, "SHARED", (*fedpurin.SHARED, "norm"))


FAULTS["fedpurin: norm layers are shared"] = "fedpurin", norm_layers_are_shared


# DC-PFL


@fault("dc-pfl", discrepancy, "scale")
def models_are_compared_without_scaling(scale, w):
    return w


@fault("dc-pfl", splitting, "better")
def the_worse_groups_win_the_trial(better, new, old):
    return better(old, new)


@fault("dc-pfl", splitting.GroupDevelopment, "_after_trial")
def a_lost_trial_is_repeated_at_once(judged, method, state, trial, heard):
    return replace(judged(method, state, trial, heard), held_until=0)


@fault("dc-pfl", splitting.GroupDevelopment, "due")
def layers_wait_although_groups_change(due, method, state, group):
    return due(method, replace(state, phase="watch"), group)


@fault("dc-pfl", groups, "intervals")
def no_layer_ever_waits(intervals, found, mean, alpha, tau, low):
    return intervals(found, mean, 1, tau, low)


@fault("dc-pfl", dcpfl.DCPFL, "work")
def the_loss_after_training_makes_the_curve(work, method, state, task, trainer, *rest):
    after, update = work(method, state, task, trainer, *rest)
    return after, replace(update, loss=trainer.loss(after.weights))


@fault("dc-pfl", dcpfl.DCPFL, "work")
def the_winner_of_a_trial_is_not_adopted(work, method, state, task, *rest):
    return work(method, state, replace(task, adopt=False), *rest)


@fault("dc-pfl", splitting.GroupDevelopment, "after")
def the_curve_forgets_who_is_absent(after, method, state, heard):
    return after(method, replace(state, losses={}), heard)


@fault("dc-pfl", groups, "covered_average")
def a_groups_average_does_not_weigh_samples(average, weights, updates, spec, *combine):
    return average(weights, equally_weighted(updates), spec, *combine)


@fault("dc-pfl", groups, "calm_layers")
def the_least_discrepant_layers_go_every_round(calm_layers, found, sizes, share):
    return calm_layers(-found, sizes, share)


@fault("dc-pfl", groups.Averaging, "average")
def layers_that_have_waited_are_measured_with_the_others(average, method, group, *rest, **also):
    alike = replace(group, averaged=np.full_like(group.averaged, group.averaged.max()))
    after = average(method, alike, *rest, **also)
    return replace(after, averaged=average(method, group, *rest, **also).averaged)
