"""SRP-pFed's rounds (Algorithms 1 and 2, eq. 5 to 8): the uniform numbers behind the draws are an input."""

import math

import numpy as np
from tests.protocols.methods.rounds.model import (
    bits,
    covered_mean,
    layers,
    less,
    loss,
    parameters,
    train,
)


def smallest(w, entries, rate):
    """The floor(rate * d + 1/2) entries of least magnitude; of equals the first."""
    count = min(len(entries), max(1, math.floor(rate * len(entries) + 0.5)))
    order = sorted(entries, key=lambda k: (abs(w[k]), k))
    if count < len(order):
        less(abs(w[order[count - 1]]), abs(w[order[count]]))
    return set(order[:count])


def draw(memory, uniforms):
    """For each number the first rate whose cumulated share of h reaches it; each rate once."""
    drawn, total = [], sum(memory)
    for u in uniforms:
        cumulated = [sum(memory[: j + 1]) / total for j in range(len(memory))]
        j = next((j for j, reached in enumerate(cumulated) if not less(reached, u)), len(memory) - 1)
        if j not in drawn:
            drawn.append(j)
    return drawn


def affordable(drawn, rates, limit):
    """The rates that were drawn up to a limit, else the largest below it."""
    return [j for j in drawn if rates[j] <= limit] or [
        max(j for j, rate in enumerate(rates) if rate <= limit)
    ]


def first_least(mixtures):
    """The one of least loss, the first of equals."""
    best = mixtures[0]
    for mixture in mixtures[1:]:
        best = mixture if less(mixture[0], best[0]) else best
    return best


def rounds(model, initial, devices, training, settings, rounds):
    shared, own = np.array(initial, float), {}
    rates = [(j + 1) / settings["num_rates"] for j in range(settings["num_rates"])]
    memory, seen = [1.0] * len(rates), []
    ranked = [parameters(model)]
    if settings["ranking"] == "layer":
        ranked = list(layers(model, norm=True).values())
    for at_hand in rounds:
        drawn = draw(memory, at_hand["uniforms"])
        plan, updates, sent, losses, used = {}, {}, [], [], set()
        for name in at_hand["participants"]:
            device = devices[name]
            down = set(at_hand["entries"].get(name, parameters(model)))
            tried = drawn if settings["downlink"] == "share" else affordable(drawn, rates, device["ratio"])
            plan[name] = {"rates": [rates[j] for j in tried], "mask": bits(model, down)}
            if name not in own:
                own[name] = np.array(initial, float)
                for k in down if settings["first"] == "shared" else ():
                    own[name][k] = shared[k]
            mixtures = []
            for j in tried:
                parts = [[k for k in part if k in down] for part in ranked]
                mask = set().union(*(smallest(own[name], part, rates[j]) for part in parts if part))
                fused = own[name].copy()
                for k in mask:
                    fused[k] = shared[k]
                mixtures.append((loss(model, device, fused), fused, mask, j))
            before, fused, mask, j = first_least(mixtures)
            own[name], _ = train(model, device, training, fused)
            updates[name] = {"mask": bits(model, mask), "samples": device["samples"], "loss": before}
            updates[name]["rate"] = rates[j] if settings["credit"] == "used" else None
            if name in at_hand["arrived"]:
                sent.append((own[name], mask, device["samples"]))
                losses.append(before)
                used |= {j}
        gain = 1 - 1 / (1 + math.exp(-sum(losses) / len(losses)))
        credited = used if settings["credit"] == "used" else drawn
        memory = [settings["decay"] * h + (gain if j in credited else 0) for j, h in enumerate(memory)]
        shared = merged(settings["aggregation"], shared, sent, parameters(model))
        seen.append(
            {
                "participants": at_hand["participants"],
                "plan": plan,
                "updates": updates,
                "kept": {name: own[name] for name in at_hand["participants"]},
                "shared": shared,
                "memory": np.array(memory),
            }
        )
    return seen


def merged(how, shared, sent, entries):
    """The next w_g: a mean over who sent an entry, or one of the two printed forms."""
    if how == "covered":
        return covered_mean(shared, sent)
    total, after = sum(n for _, _, n in sent), shared.copy()
    for k in entries:
        if how == "delta":
            after[k] += sum(n * (w[k] - shared[k]) for w, mask, n in sent if k in mask) / total
        else:
            after[k] = sum(n * w[k] for w, mask, n in sent if k in mask) / total
    return after
