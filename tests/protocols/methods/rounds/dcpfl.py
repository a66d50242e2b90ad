"""DC-PFL's rounds (sections III and IV): discrepancy, groups, rapid decrease, trials, layer intervals."""

import numpy as np
from tests.protocols.methods.rounds.model import bits, covered_mean, layers, less, loss, train


def scaled(values):
    """S of eq. 3."""
    low, high = min(values), max(values)
    return [(value - low) / (high - low) if high > low else 0.0 for value in values]


def apart(one, other):
    """The mean |S(one) - S(other)|."""
    return sum(abs(a - b) for a, b in zip(scaled(one), scaled(other), strict=True)) / len(one)


def clusters(names, distance, gamma):
    """Average linkage (section III-B): clusters merge up to gamma times the height of the last merge."""

    def between(one, other):
        return sum(distance(i, j) for i in one for j in other) / len(one) / len(other)

    found, merges = [[name] for name in names], []
    while len(found) > 1:
        pairs = [(between(a, b), x, y) for x, a in enumerate(found) for y, b in enumerate(found) if x < y]
        height, x, y = min(pairs)
        merges.append((height, found[x], found[y]))
        found = [c for z, c in enumerate(found) if z not in (x, y)] + [found[x] + found[y]]
    last = max((height for height, _, _ in merges), default=0.0)
    groups = {name: {name} for name in names}
    for height, one, other in merges:
        if not less(gamma * last, height):
            whole = set(one) | set(other)
            groups.update(dict.fromkeys(whole, whole))
    return {frozenset(group) for group in groups.values()}


def decrease_is_over(curve, window, observe):
    """Whether some radius of curvature (eq. 4) lay below the next `observe` ones."""
    smooth = [np.mean(curve[max(0, t - window) : t]) for t in range(1, len(curve) + 1)]
    radii = []
    for t in range(max(window + 1, 3), len(curve) + 1):
        slope = smooth[t - 1] - smooth[t - 2]
        bend = slope - (smooth[t - 2] - smooth[t - 3])
        radii.append((1 + slope**2) ** 1.5 / bend if bend > 0 else np.inf)
    return any(
        all(less(radii[t], later) for later in radii[t + 1 : t + 1 + observe])
        for t in range(len(radii) - observe)
    )


class Coordinator:
    """What is known between rounds. Groups are frozen sets of names; each has a model, for each layer the
    round of its last average, and the rounds from one upload to the next.
    """

    def __init__(self, model, initial, settings):
        self.model, self.settings, self.layers = model, settings, list(layers(model, norm=True).values())
        self.groups = {frozenset(): self.fresh(np.array(initial, float))}
        self.gamma, self.trial, self.phase = 1.0, None, "watch"
        self.curve, self.losses, self.met, self.last = [], {}, {}, {}
        self.accepted, self.hold = None, 0

    def fresh(self, weights):
        count = len(self.layers)
        return {"weights": weights, "averaged": [0] * count, "every": [self.settings["tau"]] * count}

    def admit(self, name):
        if len(self.groups) == 1:
            ((members, group),) = self.groups.items()
            self.groups = {members | {name}: group}

    def group_of(self, name, groups=None):
        return next((members for members in groups or self.groups if name in members), None)

    def on_trial(self, name):
        return self.trial is not None and self.group_of(name, self.trial) != self.group_of(name)

    def due(self, number, every):
        if number <= self.settings["start_rounds"] or self.phase in ("gather", "settle"):
            return list(range(len(every)))
        return [layer for layer, interval in enumerate(every) if number % interval == 0]

    def distance(self, i, j):
        """The mean over the rounds in which two met; else by way of their best common acquaintance."""

        def met(a, b):
            found = self.met.get(frozenset((a, b)))
            return sum(found) / len(found) if found else None

        if (known := met(i, j)) is not None:
            return known
        others = {name for pair in self.met for name in pair} - {i, j}
        through = [
            max(met(i, k), met(j, k)) for k in others if met(i, k) is not None and met(j, k) is not None
        ]
        if through:
            return min(through)
        return float(np.mean([sum(found) / len(found) for found in self.met.values()]))

    def fits(self, ratio):
        """The smallest layers that make up at most this share of the parameters."""
        order = sorted(range(len(self.layers)), key=lambda at: (len(self.layers[at]), at))
        room = ratio * sum(len(at) for at in self.layers) + 1e-6
        sums = [sum(len(self.layers[at]) for at in order[: n + 1]) for n in range(len(order))]
        return sorted(at for at, total in zip(order, sums, strict=True) if total <= room)

    def average(self, group, sent, number, members):
        """A group after its members' updates: name -> (weights, layers, samples)."""
        entries = [(w, {k for at in up for k in self.layers[at]}, n) for w, up, n in sent.values()]
        weights = covered_mean(group["weights"], entries)
        averaged, every = list(group["averaged"]), list(group["every"])
        for layer in range(len(self.layers)):
            if any(layer in up for _, up, _ in sent.values()):
                averaged[layer] = number
        slow, quick = self.settings["alpha"] * self.settings["tau"], self.settings["tau"]
        holders = [[w for w, up, _ in sent.values() if layer in up] for layer in range(len(self.layers))]
        if len(members) == 1:
            every = [slow] * len(self.layers)
        elif len(sent) > 1 and all(holders):
            found = [
                sum(apart(w[at], weights[at]) for w in copies) / len(copies)
                for at, copies in zip(self.layers, holders, strict=True)
            ]
            if self.settings["low_discrepancy"] == "auto":
                if len(set(group["averaged"])) == 1:
                    every = [quick if layer in self.frequent(found) else slow for layer in range(len(found))]
            else:
                low = self.settings["low_discrepancy"] * sum(found) / len(found)
                every = [slow if less(own, low) else quick for own in found]
        return {"weights": weights, "averaged": averaged, "every": every}

    def frequent(self, found):
        """By falling discrepancy the layers that still fit into a share of the parameters, or the first."""
        taken, share = [], self.settings["frequent_share"]
        everything = sum(len(at) for at in self.layers)
        for _, layer in sorted((-own, layer) for layer, own in enumerate(found)):
            if sum(len(self.layers[at]) for at in [*taken, layer]) <= share * everything:
                taken.append(layer)
        return taken or [max(range(len(found)), key=lambda layer: (found[layer], -layer))]

    def compare(self, sent):
        """Each pair's first `start_rounds` discrepancies (eq. 3), over the layers that both sent."""
        for i in sent:
            for j in sent:
                common = [k for at in sent[i][1] if at in sent[j][1] for k in self.layers[at]]
                found = self.met.setdefault(frozenset((i, j)), []) if i < j else []
                if i < j and common and len(found) < self.settings["start_rounds"]:
                    found.append(apart(sent[i][0][common], sent[j][0][common]))

    def take(self, number, heard):
        """A round's updates: name -> (loss, trial losses or None, (weights, layers, samples))."""
        self.losses.update({name: update[0] for name, update in heard.items()})
        if self.phase != "settle":
            self.curve.append(sum(self.losses.values()) / len(self.losses))
        guests = [name for name in heard if self.group_of(name) is None]
        self.last.update(dict.fromkeys(heard, number))
        for members, group in list(self.groups.items()):
            sent = {n: heard[n][2] for n in heard if n in members and not self.on_trial(n)}
            whole = len(self.due(number, group["every"])) == len(self.layers)
            if self.phase != "settle" and whole:
                self.compare({name: update for name, update in sent.items() if update[1]})
            self.groups[members] = self.average(group, sent, number, members)
        self.judge(number, heard) if self.trial is not None else self.look_ahead(number, heard)
        for name in guests:
            self.welcome(name, heard[name][2])

    def welcome(self, name, update):
        """A guest joins the group whose model its own comes nearest to."""
        at = [k for layer in update[1] for k in self.layers[layer]]
        near = {members: apart(update[0][at], group["weights"][at]) for members, group in self.groups.items()}
        members = min(near, key=near.get)
        self.groups = {m | {name} if m == members else m: group for m, group in self.groups.items()}
        del self.last[name]

    def judge(self, number, heard):
        votes = [update[1] for name, update in heard.items() if update[1] and self.on_trial(name)]
        if not votes:
            return
        trial, self.trial, self.phase = self.trial, None, "settle"
        old, new = (sum(vote[side] for vote in votes) / len(votes) for side in (0, 1))
        if less(new, old):
            self.groups = {m: self.groups.get(m, group) for m, group in trial.items()}
            self.gamma, self.curve, self.accepted = self.trial_gamma, [], number
        else:
            self.hold = number + self.settings["hold_rounds"]

    def look_ahead(self, number, heard):
        phase, self.phase = self.phase, "watch"
        split = self.next_groups(number, phase)
        if split is None:
            return
        self.phase = phase
        if any(
            len(members) > 1 and len(self.due(number, group["every"])) < len(self.layers)
            for members, group in self.groups.items()
        ):
            self.phase = "gather"
            return
        first = self.gamma > self.settings["gamma"]
        groups = {members: self.new_group(members, heard, number) for members in split[1]}
        if first:
            self.groups, self.gamma, self.curve, self.phase = groups, split[0], [], "settle"
        else:
            self.trial, self.trial_gamma, self.phase = groups, split[0], "trial"

    def new_group(self, members, heard, number):
        if members in self.groups:
            return self.groups[members]
        origin = self.groups[self.group_of(min(members))]
        sent = {name: heard[name][2] for name in sorted(members) if name in heard}
        return {**self.average(origin, sent, number, members), "averaged": [number] * len(self.layers)}

    def next_groups(self, number, phase):
        """gamma and the groups that follow; None: it is too early, or there are none."""
        settings, tree = self.settings, sorted({name for pair in self.met for name in pair})
        placed = {name for members in self.groups for name in members}
        tree = [name for name in tree if name in placed]
        if not tree or number < settings["start_rounds"]:
            return None
        if self.gamma > settings["gamma"]:
            return settings["gamma"], clusters(tree, self.distance, settings["gamma"])
        over = phase == "gather" or decrease_is_over(self.curve, settings["window"], settings["observe"])
        if not settings["dynamic"] or number < self.hold or not over:
            return None
        now = {frozenset(members & set(tree)) for members in self.groups} - {frozenset()}
        gamma = self.gamma
        while gamma > 0:
            gamma = max(0.0, round(gamma - settings["gamma_step"], 10))
            groups = clusters(tree, self.distance, gamma)
            if groups != now:
                return gamma, groups
        return None

    def mean_model(self):
        total = sum(len(members) for members in self.groups) or 1
        return sum(max(1, len(m)) * group["weights"] for m, group in self.groups.items()) / max(1, total)

    def seen(self, groups):
        """Groups by their first member."""
        return {
            min(members): {
                "members": sorted(members),
                "model": group["weights"],
                "every": np.array(group["every"]),
            }
            for members, group in sorted(groups.items(), key=lambda item: min(item[0]))
        }


def task(coordinator, name, number, ratio):
    """What goes down: layers with the model they are of, which go up, the trial's, and whether to adopt."""
    every = coordinator.fits(ratio)
    members = coordinator.group_of(name)
    if members is None:
        return coordinator.mean_model(), every, every, None, False
    group, last = coordinator.groups[members], coordinator.last.get(name)
    down = [at for at in every if group["averaged"][at] >= (last or 1)]
    if last is not None and len(members) == 1:
        down = []
    up, trial = [at for at in coordinator.due(number, group["every"]) if at in every], None
    if coordinator.on_trial(name):
        up, rival = [], coordinator.group_of(name, coordinator.trial)
        if rival is not None:
            whole = [] if len(rival) == 1 and last is not None else every
            trial = coordinator.trial[rival]["weights"], whole
    return group["weights"], down, up, trial, last is not None and last == coordinator.accepted


def rounds(model, initial, devices, training, settings, rounds):
    coordinator, seen = Coordinator(model, initial, settings), []
    own, rivals = {name: np.array(initial, float) for name in devices}, dict.fromkeys(devices)
    names = list(layers(model, norm=True))

    def flat(chosen):
        return {k for at in chosen for k in coordinator.layers[at]}

    for number, at_hand in enumerate(rounds, start=1):
        for name in devices:
            if devices[name]["joins"] == number:
                coordinator.admit(name)
        plan, updates, kept, heard = {}, {}, {}, {}
        on_trial = [name for name in at_hand["participants"] if coordinator.on_trial(name)]
        for name in at_hand["participants"]:
            device = devices[name]
            weights, down, up, trial, adopt = task(coordinator, name, number, device["ratio"])
            plan[name] = {
                "mask": bits(model, flat(down)),
                "upload": [names[at] for at in up],
                "adopt": adopt,
                "trial": None if trial is None else bits(model, flat(trial[1])),
            }
            before = rivals[name] if adopt and rivals[name] is not None else own[name]
            start, votes = before.copy(), None
            for k in flat(down):
                start[k] = weights[k]
            own[name], _ = train(model, device, training, start)
            rivals[name] = None
            if trial is not None:
                other = before.copy()
                for k in flat(trial[1]):
                    other[k] = trial[0][k]
                rivals[name], _ = train(model, device, training, other)
                votes = [loss(model, device, own[name]), loss(model, device, rivals[name])]
                up = []
            told = loss(model, device, start)
            updates[name] = {
                "mask": bits(model, flat(up)),
                "samples": device["samples"],
                "loss": told,
                "trial": votes,
            }
            kept[name] = own[name]
            if name in at_hand["arrived"]:
                heard[name] = told, votes, (own[name], up, device["samples"])
        coordinator.take(number, heard)
        seen.append(
            {
                "participants": at_hand["participants"],
                "on_trial": on_trial,
                "plan": plan,
                "updates": updates,
                "kept": kept if number == len(rounds) else {},
                "groups": coordinator.seen(coordinator.groups),
                "trial": None if coordinator.trial is None else coordinator.seen(coordinator.trial),
                "phase": coordinator.phase,
                "gamma": coordinator.gamma,
                "curve": np.array(coordinator.curve),
            }
        )
    return seen
