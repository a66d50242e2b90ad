"""FedSPU's rounds (Algorithms 1 and 2, section 3): the neurons that were drawn are an input."""

import numpy as np
from tests.protocols.methods.rounds.model import bits, covered_mean, kinds, less, loss, size, train


def between(model, neurons):
    """The parameters between active neurons; `neurons`: for each group, which are active."""
    active, start = set(), 0
    for tensor in model:
        for offset, index in enumerate(np.ndindex(*tensor["shape"])):
            ends = zip(tensor["neurons"], index, strict=True)
            if tensor["kind"] != "stat" and all(g is None or i in neurons[g] for g, i in ends):
                active.add(start + offset)
        start += size(tensor)
    return active


def rounds(model, initial, devices, training, settings, rounds):
    shared = np.array(initial, float)
    own = {name: np.array(initial, float) for name in devices}
    previous, stopped, seen = {}, set(), []
    for at_hand in rounds:
        here = [name for name in at_hand["participants"] if name not in stopped]
        plan, updates, losses, sent = {}, {}, {}, []
        for name in here:
            device, active = devices[name], between(model, at_hand["neurons"][name])
            for group, neurons in enumerate(at_hand["neurons"][name]):
                whole = max(t["shape"][0] for t in model if t["neurons"][0] == group)
                assert len(neurons) == max(1, int(device["ratio"] * whole + 1e-9))
            plan[name] = {"mask": bits(model, active)}
            start = own[name].copy()
            for k in active:
                start[k] = shared[k]
            own[name], _ = train(model, device, training, start, trainable=active)
            updates[name] = {"mask": bits(model, active), "samples": device["samples"]}
            if name in at_hand["arrived"]:
                sent.append((own[name], active, device["samples"]))
            if settings["early_stopping"]:
                weight = settings["loss_weight"]
                losses[name] = weight * loss(model, device, own[name])
                losses[name] += (1 - weight) * loss(model, device, own[name], "validation")
                if name in previous and less(previous[name], losses[name]):
                    stopped.add(name)
                previous[name] = losses[name]
        shared = covered_mean(shared, sent)
        seen.append(
            {
                "participants": here,
                "plan": plan,
                "updates": updates,
                "kept": {name: own[name] for name in here},
                "stopping_loss": losses,
                "stopped": sorted(stopped & set(here)),
                "shared": shared,
            }
        )
    assert all(kind != "stat" or w == v for kind, w, v in zip(kinds(model), shared, initial, strict=True))
    return seen
