"""KAPC's and BLS's rounds (Algorithms 1 to 6, eq. 11 to 15 and 29 to 34)."""

import math

import numpy as np
from tests.protocols.methods.rounds.model import bits, layers, less, patch, train


def normalised(row):
    """Clipped at 0 and divided by its sum; an empty row becomes uniform."""
    row = [max(0.0, share) for share in row]
    total = sum(row)
    return [share / total for share in row] if total else [1 / len(row)] * len(row)


def projected(row):
    """The nearest shares: each loses the same, and what is below 0 becomes 0."""
    for kept in range(len(row), 0, -1):
        largest = sorted(row, reverse=True)[:kept]
        loss = (sum(largest) - 1) / kept
        if largest[-1] > loss:
            return [max(0.0, share - loss) for share in row]
    raise AssertionError("a row without shares")


def stepped(shares, copies, settings):
    """One step of eq. 12 on the relationships of one layer, from eq. 13, then shares again.

    With step = per-layer, weights are less their mean, and eta counts in units of 1 / L_r (Theorem 1).
    """
    count, rate = len(copies), settings["relation_rate"]
    if settings["step"] == "per-layer":
        middle = sum(copies) / count
        copies = [copy - middle for copy in copies]
        gram = [[float(np.dot(one, other)) for other in copies] for one in copies]
        steepest = 2 * settings["coaching"] * max(np.linalg.eigvalsh(gram)) + settings["equal_sharing"]
        rate = rate / steepest if steepest > 0 else 0.0
    after = []
    for i in range(count):
        target = sum(shares[i][j] * copies[j] for j in range(count))
        row = []
        for j in range(count):
            gradient = 2 * settings["coaching"] * float(np.dot(copies[j], target - copies[i]))
            gradient += settings["equal_sharing"] * (shares[i][j] - 1 / count)
            row.append(shares[i][j] - rate * gradient)
        after.append(projected(row) if settings["rows"] == "simplex" else normalised(row))
    return after


def grown(cube, known, names, num_layers):
    """R for all names: a newcomer gets 1/N of every row, its own rows are uniform."""
    total, new = len(names), {}
    for name in names:
        for layer in range(num_layers):
            if name not in known:
                new[name, layer] = dict.fromkeys(names, 1 / total)
                continue
            old = cube[name, layer]
            left = 1 - (total - len(known)) / total
            new[name, layer] = {other: old[other] * left if other in known else 1 / total for other in names}
    return new


def bound(upto, norms, distances, widths):
    """M(O) of eq. 29, its sum written out."""
    found = distances[upto - 1] / (2 * norms[upto - 1])
    for k in range(1, upto):
        product = math.prod(math.sqrt(widths[upto + 1 - j - 1]) for j in range(1, k + 1))
        found += distances[upto - k - 1] * product / (2 * norms[upto - k - 1])
    return found


def satisfied(upto, full, now, shapes, classes):
    """Inequality (29) at Omega = upto."""
    (norms, distances), (norms_now, distances_now) = full, now
    count, widths = len(shapes), [columns for _, columns in shapes]
    left = count * shapes[upto - 1][0] * bound(upto, norms_now, distances_now, widths)
    left *= math.prod(norms_now[:upto]) / math.prod(norms)
    left /= upto * classes * 2 ** (count - upto)
    return less(left, bound(count, norms, distances, widths))


def norms(w, places):
    """Of each layer."""
    return [math.sqrt(sum(w[k] ** 2 for k in entries)) for entries in places]


def omega(visit, now, shapes, classes):
    """What to remember, and how many layers to send up."""
    count = len(shapes)
    if visit is None:
        return {"norms": now[0], "distances": now[1], "uploaded": max(1, count - 1)}
    full = visit["norms"], visit["distances"]
    if visit["uploaded"] == count:
        full = tuple(
            [max(one, other) for one, other in zip(*pair, strict=True)]
            for pair in zip(full, now, strict=True)
        )
        return {"norms": full[0], "distances": full[1], "uploaded": max(1, count - 1)}
    holds = [satisfied(upto, full, now, shapes, classes) for upto in range(1, count + 1)]
    assert holds == sorted(holds, reverse=True), "not a prefix: this case says nothing"
    return {"norms": full[0], "distances": full[1], "uploaded": max(1, sum(holds))}


def mixed(cube, reach, models, places, settings):
    """Each participant's targets by layer, and its share in them; R is stepped and written back in place.

    `reach`: how many layers each participant exchanges; `models`: theirs, as last heard.
    """
    targets, own_shares = {name: [] for name in reach}, {name: [] for name in reach}
    for layer, entries in enumerate(places):
        here = [name for name in reach if reach[name] > layer]
        copies = [models[name][entries] for name in here]
        part = [normalised([cube[name, layer][other] for other in here]) for name in here]
        part = stepped(part, copies, settings)
        for i, name in enumerate(here):
            targets[name].append(sum(part[i][j] * copies[j] for j in range(len(here))))
            own_shares[name].append(part[i][i])
            row = {**cube[name, layer], **dict(zip(here, part[i], strict=True))}
            total = sum(row.values())
            cube[name, layer] = {other: share / total for other, share in row.items()}
    return targets, own_shares


def mean(initial, latest, places, reach):
    """Of the devices heard from, their latest layers that they exchange; all else as at the start."""
    shared = initial.copy()
    for layer, entries in enumerate(places):
        models = [w[entries] for name, w in latest.items() if reach[name] > layer]
        if models:
            shared[entries] = sum(models) / len(models)
    return shared


def rounds(model, initial, devices, training, settings, rounds):
    """`settings` without a `self_threshold` are KAPC's own, with it BLS's."""
    related, bls = layers(model, norm=False), "self_threshold" in settings
    places = list(related.values())
    shapes = [next(t["shape"] for t in model if t["layer"] == name) for name in related]
    shapes = [(shape[0], math.prod(shape[1:])) for shape in shapes]
    initial = np.array(initial, float)
    own, visits = {name: initial.copy() for name in devices}, dict.fromkeys(devices)
    latest, uploaded, cube, known, seen = {}, {}, {}, [], []
    reach = {name: max(1, int(devices[name]["ratio"] * len(places) + 1e-9)) for name in devices}
    for number, at_hand in enumerate(rounds, start=1):
        here = at_hand["participants"]
        admitted = [name for name in devices if devices[name]["joins"] <= number]
        if admitted != known:
            cube, known = grown(cube, known, admitted, len(places)), admitted
        targets, shares = mixed(
            cube,
            {name: reach[name] for name in here},
            {name: latest.get(name, initial) for name in here},
            places,
            settings,
        )
        plan, updates, kept = {}, {}, {}
        for name in here:
            bound = reach[name]
            if bls and settings["targets"] == "uploaded":
                bound = min(bound, uploaded.get(name, bound))
            down = [
                at for at in range(bound) if not bls or not less(settings["self_threshold"], shares[name][at])
            ]
            towards = own[name].copy()
            for layer in down:
                towards[places[layer]] = targets[name][layer]
            chosen = {k for layer in down for k in places[layer]}
            plan[name] = patch(model, towards, chosen)
            pull = towards, settings["coaching"], {k for entries in places[: reach[name]] for k in entries}
            after, _ = train(model, devices[name], training, own[name], pull=pull)
            own[name], up = after, reach[name]
            if bls:
                now = norms(after, places), norms(after - towards, places)
                visits[name] = omega(visits[name], now, shapes, devices[name]["classes"])
                up = min(visits[name]["uploaded"], reach[name])
            sent = {k for entries in places[:up] for k in entries}
            updates[name], kept[name] = {"mask": bits(model, sent)}, after
            if name in at_hand["arrived"]:
                latest[name] = latest.get(name, initial).copy()
                for k in sent:
                    latest[name][k] = after[k]
                uploaded[name] = up
        seen.append(
            {
                "participants": here,
                "plan": plan,
                "updates": updates,
                "kept": kept,
                "visits": {name: visits[name] for name in here if visits[name]},
                "cube": np.array(
                    [[[cube[i, layer][j] for j in known] for layer in range(len(places))] for i in known]
                ),
                "shared": mean(initial, latest, places, reach),
            }
        )
    return seen
