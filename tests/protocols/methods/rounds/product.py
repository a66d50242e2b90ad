"""The product over the same inputs: what its methods plan, do and aggregate, noted as by references."""

import numpy as np

from fleetune.protocols.method.choice import Budget, DeviceReport
from fleetune.protocols.method.method import Round
from fleetune.protocols.method.trainer import Fit
from fleetune.protocols.methods import create
from fleetune.protocols.model.spec import ModelSpec, Span, TensorSpec
from fleetune.protocols.update.selection import draw_neurons
from fleetune.protocols.wire.payloads import run_key, work_key


def spec_of(model):
    """The product's description of a model."""
    groups = {}
    for tensor in model:
        groups.update(
            {g: n for g, n in zip(tensor["neurons"], tensor["shape"], strict=True) if g is not None}
        )
    tensors = [
        TensorSpec(
            tensor["name"],
            tuple(tensor["shape"]),
            tensor["kind"],
            tensor["layer"],
            tuple(() if g is None else (Span(g, 0, groups[g]),) for g in tensor["neurons"]),
            uses=1 if tensor["kind"] == "weight" else 0,
        )
        for tensor in model
    ]
    return ModelSpec("rounds", tuple(tensors), tuple(groups[g] for g in sorted(groups)), (2,), 3)


class Exact:
    """The training that the references describe, in float32."""

    def __init__(self, spec, device, training):
        self.spec, self.epochs, self.rate = spec, training["epochs"], np.float32(training["rate"])
        self.num_samples, self.num_classes_held = device["samples"], device["classes"]
        self.number = np.float32(device["number"])
        self.targets = {part: np.asarray(device[part], np.float32) for part in ("train", "validation")}
        self.parameters = np.arange(spec.size) < spec.num_parameters

    def fit(self, weights, plan, key):
        w, gradient = weights.copy(), np.zeros_like(weights)
        for _ in range(self.epochs):
            gradient = self.gradient(w)
            step = gradient
            if plan.pull is not None:
                mask = self.parameters if plan.pull.mask is None else plan.pull.mask
                away = np.float32(2 * plan.pull.strength) * (w - plan.pull.target)
                step = gradient + np.where(mask, away, np.float32(0))
            moves = self.parameters if plan.trainable is None else plan.trainable & self.parameters
            w = np.where(moves, w - self.rate * step, w)
        w[~self.parameters] = w[~self.parameters] / 2 + self.number
        return Fit(w, self.loss(w), self.epochs, gradient if plan.keep_last_gradient else None)

    def gradient(self, weights, rows=None):
        return np.where(self.parameters, weights - self.targets["train"], np.float32(0))

    def loss(self, weights, part="train", rows=None):
        apart = weights.astype(np.float64) - self.targets[part]
        return float(np.mean(np.square(apart[self.parameters]))) / 2

    def accuracy(self, weights, part):
        return 1 / (1 + self.loss(weights, part))

    def batches(self, key):
        return [np.arange(self.num_samples)] * self.epochs


def mask_of(patch, spec, weights=None):
    """Which entries are in a patch, whose values must be those of `weights`, if given."""
    mask = patch.selection.mask(spec)
    assert weights is None or np.array_equal(patch.values, weights[mask]), "values of another model"
    return "".join("1" if chosen else "0" for chosen in mask[: spec.num_parameters])


def play(method_name, inputs, seed):
    """Each round as the references note it."""
    spec = spec_of(inputs["model"])
    method = create(method_name, spec, inputs["settings"])
    initial, note = np.asarray(inputs["initial"], np.float32), NOTES[method_name]
    state = method.init_coordinator(initial)
    kept = {name: method.init_device(initial) for name in inputs["devices"]}
    seen = []
    for number, at_hand in enumerate(inputs["rounds"], start=1):
        for name, device in inputs["devices"].items():
            if device["joins"] == number:
                report = DeviceReport(name, num_samples=device["samples"], ratio=device["ratio"])
                state = method.admit(state, report)
        here = [name for name in at_hand["participants"] if not method.finished(kept[name])]
        before = state
        state, tasks = method.plan(state, Round(number, tuple(here)), plan_key(seed, number))
        tasks, updates = dict(tasks), {}
        for name in here:
            device = inputs["devices"][name]
            trainer = Exact(spec, device, inputs["training"])
            key = work_key(seed, number, 1, name)
            kept[name], updates[name] = method.work(
                kept[name], tasks[name], trainer, Budget(device["ratio"]), key
            )
        state = method.aggregate(
            state, [(name, updates[name]) for name in here if name in at_hand["arrived"]]
        )
        seen.append(
            {
                "participants": here,
                "plan": {name: note.plan(method, before, name, tasks[name]) for name in here},
                "updates": {name: note.update(spec, updates[name], kept[name]) for name in here},
                "kept": {name: method.personal_model(kept[name]) for name in here},
                **note.rest(method, before, state, {name: kept[name] for name in here}),
                **({} if note.keeps or number == len(inputs["rounds"]) else {"kept": {}}),
            }
        )
    return seen


def plan_key(seed, number):
    return run_key(seed).child("plan", number, 1)


class SharedModel:
    """What is noted of a method whose coordinator sends entries of one model."""

    keeps = True

    def plan(self, method, before, name, task):
        return {"mask": mask_of(task.patch, method.spec, before.weights)}

    def update(self, spec, update, after):
        return {"mask": mask_of(update.patch, spec, after.weights), "samples": update.num_samples}


class FedSPUNotes(SharedModel):
    def rest(self, method, before, state, kept):
        return {
            "stopping_loss": {name: one.loss for name, one in kept.items() if one.loss is not None},
            "stopped": sorted(name for name, one in kept.items() if one.stopped),
            "shared": state.weights,
        }


class SRPpFedNotes(SharedModel):
    def plan(self, method, before, name, task):
        return {"rates": list(task.rates), **super().plan(method, before, name, task)}

    def update(self, spec, update, after):
        told = {"loss": update.loss, "rate": getattr(update, "rate", None)}
        return {**super().update(spec, update, after), **told}

    def rest(self, method, before, state, kept):
        return {"shared": state.weights, "memory": state.memory}


class OwnTargets:
    """What is noted of a method whose coordinator makes something for each device."""

    keeps = True

    def plan(self, method, before, name, task):
        return {"mask": mask_of(task.patch, method.spec), "values": task.patch.values}

    def update(self, spec, update, after):
        return {"mask": mask_of(update.patch, spec, after.weights)}


class KAPCNotes(OwnTargets):
    def rest(self, method, before, state, kept):
        visits = {name: one.visit for name, one in kept.items() if one.visit is not None}
        return {
            "visits": {
                name: {"norms": visit.norms, "distances": visit.distances, "uploaded": visit.uploaded}
                for name, visit in visits.items()
            },
            "cube": state.cube,
            "shared": method.shared_model(state),
        }


class FedPURINNotes(OwnTargets):
    def rest(self, method, before, state, kept):
        collaborating = [name for name, held in state.held.items() if held.collaborated is not None]
        return {"collaborating": sorted(collaborating), "shared": state.weights}


class DCPFLNotes:
    keeps = False

    def plan(self, method, before, name, task):
        chosen, trial = task.upload.mask(method.spec), None
        if task.trial is not None:
            trial = mask_of(task.trial, method.spec, group_model(before.trial, name))
        return {
            "mask": mask_of(task.patch, method.spec, group_model(before.grouping, name)),
            "upload": [layer for layer, where in method.spec.layers.items() if chosen[where].all()],
            "adopt": task.adopt,
            "trial": trial,
        }

    def update(self, spec, update, after):
        return {
            "mask": mask_of(update.patch, spec, after.weights),
            "samples": update.num_samples,
            "loss": update.loss,
            "trial": None if update.trial is None else list(update.trial),
        }

    def rest(self, method, before, state, kept):
        return {
            "on_trial": [name for name in kept if before.on_trial(name)],
            "groups": groups(state.grouping),
            "trial": None if state.trial is None else groups(state.trial),
            "phase": state.phase,
            "gamma": state.grouping.gamma,
            "curve": np.array(state.curve),
        }


def group_model(grouping, name):
    """Of the device's group; of all groups' mean for a guest."""
    place = grouping.place_of(name)
    return grouping.mean_model() if place is None else grouping.groups[place].weights


def groups(grouping):
    """By their first member."""
    found = {}
    for place, group in enumerate(grouping.groups):
        members = sorted(grouping.members(place))
        found[members[0]] = {"members": members, "model": group.weights, "every": group.every}
    return dict(sorted(found.items()))


NOTES = {
    "fedspu": FedSPUNotes(),
    "srp-pfed": SRPpFedNotes(),
    "kapc": KAPCNotes(),
    "kapc-bls": KAPCNotes(),
    "fedpurin": FedPURINNotes(),
    "dc-pfl": DCPFLNotes(),
}


def entries(method_name, inputs, participants, number):
    """Which entries go down to devices that are sent a share of them; of bar, for FedPURIN."""
    spec, found = spec_of(inputs["model"]), {}
    method = create(method_name, spec, inputs["settings"])
    state = method.init_coordinator(np.asarray(inputs["initial"], np.float32))
    for name in participants:
        ratio = inputs["devices"][name]["ratio"]
        if method_name == "fedpurin":
            chosen = method._sent_of_bar(ratio, number)
        else:
            state = method.admit(state, DeviceReport(name, ratio=ratio))
            tasks = method.plan(state, Round(number, (name,)), plan_key(0, number))[1]
            chosen = tasks[name].patch.selection.mask(spec)
        if np.count_nonzero(chosen) < spec.num_parameters:
            found[name] = np.flatnonzero(chosen).tolist()
    return found


def drawn(method_name, inputs, seed):
    """What the product draws at random, as inputs of a reference, round by round."""
    spec = spec_of(inputs["model"])
    found = []
    for number, at_hand in enumerate(inputs["rounds"], start=1):
        key, more = plan_key(seed, number), {}
        if method_name == "fedspu":
            more["neurons"] = {
                name: [
                    np.flatnonzero(active).tolist()
                    for active in draw_neurons(
                        spec.groups, inputs["devices"][name]["ratio"], key.child(name).value
                    )
                ]
                for name in at_hand["participants"]
            }
        if method_name == "srp-pfed":
            uniforms = 1 - key.child("rates").uniform(inputs["settings"]["draws"])
            more["uniforms"] = [round(float(u), 9) for u in uniforms]
        if method_name in ("srp-pfed", "fedpurin"):
            more["entries"] = entries(method_name, inputs, at_hand["participants"], number)
        found.append({**at_hand, **more})
    return found
