"""FedPURIN's rounds (Algorithm 1, eq. 7 to 11, sections 3.3 and 4.5)."""

import numpy as np
from tests.protocols.methods.rounds.model import bits, kinds, less, patch, size, train

CUTOFF = 1e-10


def critical_entries(model, scores, tau, all_zero):
    """Of each tensor but norms the floor(tau * size) highest scores, ties in."""
    mask, start = set(), 0
    for tensor in model:
        entries = range(start, start + size(tensor))
        start += size(tensor)
        count = int(tau * len(entries))
        if tensor["kind"] not in ("weight", "bias") or count == 0:
            continue
        ordered = sorted((scores[k] for k in entries), reverse=True)
        threshold = ordered[count - 1]
        for other in ordered[count:]:
            less(other, threshold)
        if threshold <= CUTOFF:
            above = [score for score in ordered if score > CUTOFF]
            if not above and all_zero == "omit":
                continue
            threshold = min(above) if above else threshold
        mask |= {k for k in entries if scores[k] >= threshold}
    return mask


def collaborators(masks, number, beta):
    """C_i of every device (section 3.3)."""
    overlap = {}
    for i, mine in masks.items():
        for j, other in masks.items():
            if i != j:
                overlap[i, j] = 1 - len(mine ^ other) / (2 * len(mine)) if mine else 0.0
    if number > beta or not overlap:
        return {i: [] for i in masks}
    mean, largest = sum(overlap.values()) / len(overlap), max(overlap.values())
    threshold = mean + number / beta * (largest - mean)
    chosen = {i: [] for i in masks}
    for (i, j), share in overlap.items():
        equal = abs(share - threshold) < 1e-9
        if equal or less(threshold, share):
            chosen[i].append(j)
    return chosen


def combined(own, held_mask, delta, bar, down, shared, in_step):
    """What a device trains from (eq. 11), and which entries of it the coordinator must send.

    `down`: of which entries bar is sent this time; the device keeps its own elsewhere.
    """
    start, sent = own.copy(), set()
    for k in shared if bar is not None else ():
        if k in held_mask:
            if delta is not None:
                start[k] = delta[k]
                sent.add(k)
        elif k not in down:
            continue
        elif bar[k] != 0:
            start[k] = bar[k]
            sent.add(k)
        elif in_step:
            start[k] = 0.0
    return start, sent


def delta_of(mine, others, own, masks):
    """The mean of the masked weights of a device and its collaborators (eq. 9); None: it has none."""
    group = [mine, *others]
    if not others:
        return None
    return {k: sum(own[j][k] if k in masks[j] else 0.0 for j in group) / len(group) for k in masks[mine]}


def rounds(model, initial, devices, training, settings, rounds):
    shared = {k for k, kind in enumerate(kinds(model)) if kind in ("weight", "bias")}
    initial = np.array(initial, float)
    own = {name: initial.copy() for name in devices}
    own_mask, own_round = {name: set() for name in devices}, dict.fromkeys(devices, 0)
    held, delta, bar, seen = {}, {}, None, []
    for number, at_hand in enumerate(rounds, start=1):
        plan, updates, kept = {}, {}, {}
        for name in at_hand["participants"]:
            held_round, held_mask = held.get(name, (0, set()))
            in_step = 0 < held_round == own_round[name]
            down = at_hand["entries"].get(name, shared)
            start, sent = combined(own[name], held_mask, delta.get(name), bar, down, shared, in_step)
            plan[name] = patch(model, start, sent)
            for k in own_mask[name] if not in_step else ():
                start[k] = own[name][k]
            after, gradient = train(model, devices[name], training, start)
            if settings["gradient"] == "change":
                gradient = after - start
            product = gradient * after
            scores = abs(product**2 / 2 - product if settings["second_order"] else product)
            tau = min(settings["tau"], devices[name]["ratio"])
            mask = critical_entries(model, scores, tau, settings["all_zero"])
            own[name], own_mask[name], own_round[name] = after, mask, number
            updates[name], kept[name] = {"mask": bits(model, mask)}, after
        arrived = at_hand["arrived"]
        masks = {name: own_mask[name] for name in arrived}
        chosen = collaborators(masks, number, settings["beta"])
        delta = {name: delta_of(name, chosen[name], own, masks) for name in arrived}
        held.update({name: (number, masks[name]) for name in arrived})
        bar = initial.copy()
        for k in shared:
            bar[k] = sum(own[j][k] if k in masks[j] else 0.0 for j in arrived) / len(arrived)
        seen.append(
            {
                "participants": at_hand["participants"],
                "plan": plan,
                "updates": updates,
                "kept": kept,
                "collaborating": sorted(name for name in arrived if chosen[name]),
                "shared": bar,
            }
        )
    return seen
