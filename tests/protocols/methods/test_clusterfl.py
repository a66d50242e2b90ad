"""ClusterFL by ADMM: what its rounds converge to, its relations, and what a device is asked for."""

import numpy as np
import pytest
from tests.conftest import PullToTarget, tiny_spec

from fleetune.protocols.errors import SettingError
from fleetune.protocols.method.choice import Budget
from fleetune.protocols.method.method import Round
from fleetune.protocols.method.targets import Update
from fleetune.protocols.method.trainer import Fit
from fleetune.protocols.methods import create
from fleetune.protocols.methods.clusterfl import ClusterFL, group_relations, soft_relations, stepped
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Everything

SPEC = tiny_spec()
PARAMETERS = slice(0, SPEC.num_parameters)
DEVICES = ("d0", "d1", "d2", "d3", "d4")


class Exact(PullToTarget):
    """Trains ||w - aim||^2 / 2 and the pull to their minimum."""

    def __init__(self, aim):
        super().__init__(SPEC, "exact")
        self.aim = aim

    def fit(self, weights, plan, key):
        twice = 2 * plan.pull.strength
        return Fit(((self.aim + twice * plan.pull.target) / (1 + twice)).astype(np.float32), 0.0, 1)


def aims(*levels):
    """Of each device, near its level."""
    drawn = [Key.of("aim", at).uniform(SPEC.size) for at in range(len(levels))]
    return {f"d{at}": level + one for at, (level, one) in enumerate(zip(levels, drawn, strict=True))}


def played(method, wanted, rounds, participants=lambda number: DEVICES):
    weights = np.zeros(SPEC.size, np.float32)
    state, devices = method.init_coordinator(weights), dict.fromkeys(wanted, method.init_device(weights))
    states = []
    for number in range(1, rounds + 1):
        here = tuple(participants(number))
        state, tasks = method.plan(state, Round(number, here), Key(number))
        updates = []
        for name in here:
            devices[name], update = method.work(
                devices[name], tasks[name], Exact(wanted[name]), Budget(), Key(0)
            )
            updates.append((name, update))
        state = method.aggregate(state, updates)
        states.append(state)
    return states, {name: device.weights[PARAMETERS] for name, device in devices.items()}


def minimum(wanted, groups, shrink, attract):
    """Of sum ||w_i - aim_i||^2 / 2 + shrink ||w_i||^2 - attract * sum over groups n ||mean||^2."""
    best = {}
    for group in groups:
        mean = sum(wanted[name] for name in group) / len(group) / (1 + 2 * shrink - 2 * attract)
        for name in group:
            best[name] = ((wanted[name] + 2 * attract * mean) / (1 + 2 * shrink))[PARAMETERS]
    return best


@pytest.mark.parametrize("penalty", [None, 1.0, 3.0])
def test_admm_ends_at_the_objectives_minimum_whatever_the_penalty(penalty):
    """Without multipliers, or without the other devices' share of the penalty, it ends elsewhere."""
    wanted = aims(5, 5, 5, -5, -5)
    method = ClusterFL(SPEC, num_groups=2, shrink=0.3, attract=0.2, regroup_rounds=3, penalty=penalty)
    states, found = played(method, wanted, 120)
    best = minimum(wanted, [DEVICES[:3], DEVICES[3:]], 0.3, 0.2)
    for name in DEVICES:
        assert found[name] == pytest.approx(best[name], abs=1e-4)
    assert np.abs(found["d0"] - wanted["d0"][PARAMETERS]).max() > 0.2
    gaps = [method.diagnose_round(state)["consensus_gap"] for state in states]
    assert gaps[0] > 0.1
    assert gaps[-1] < 1e-4
    sizes = method.diagnose_round(states[-1])["group_devices"]
    assert sizes.keys() == {"group 1", "group 2"}
    assert sorted(sizes.values()) == [2, 3]


def test_admm_ends_there_too_when_only_some_take_part_each_round():
    wanted = aims(5, 5, 5, -5, -5)
    method = ClusterFL(SPEC, num_groups=2, shrink=0.3, attract=0.2)
    order = [DEVICES, *[(DEVICES[at % 5], DEVICES[(at + 2) % 5]) for at in range(300)]]
    _, found = played(method, wanted, len(order), lambda number: sorted(order[number - 1]))
    for name, best in minimum(wanted, [DEVICES[:3], DEVICES[3:]], 0.3, 0.2).items():
        assert found[name] == pytest.approx(best, abs=1e-3)


def test_a_step_of_copies_and_multipliers():
    """F' W = 3, U = 1, attract 0.5, rho 4: O = (12 - 1) / 3, U = 1 + 4 * (11/3 - 3)."""
    copies, multipliers = stepped(np.array([[3.0]]), np.array([[1.0]]), 0.5, 4.0)
    assert copies == pytest.approx(11 / 3)
    assert multipliers == pytest.approx(1 + 8 / 3)


def test_relations_of_groups_are_orthonormal():
    columns, relations = group_relations({"a": 7, "b": 2, "c": 7})
    assert columns == (("a", "c"), ("b",))
    half = 1 / np.sqrt(2)
    assert relations == pytest.approx(np.array([[half, 0], [0, 1], [half, 0]]))


def test_soft_relations_are_shares_of_positive_centred_products():
    """Moves (2, 0), (1, 0), (-3, 0): centred already; devices 0 and 1 share their columns 2 : 1."""
    moves = np.array([[2.0, 0], [1, 0], [-3, 0]])
    raw = np.array([[2 / 3, 2 / 3, 0], [1 / 3, 1 / 3, 0], [0, 0, 1]])
    largest = np.linalg.norm(raw, 2)
    assert largest == pytest.approx(np.sqrt(10) / 3)
    assert soft_relations(moves @ moves.T) == pytest.approx(raw / largest)
    shifted = moves + np.array([10, -4])
    assert soft_relations(shifted @ shifted.T) == pytest.approx(raw / largest)
    assert not soft_relations(np.zeros((2, 2))).any()


def test_a_devices_relations_are_its_own_group_and_a_column_that_stays_keeps_its_multiplier():
    method = ClusterFL(SPEC, num_groups=2, regroup_rounds=1)
    states, _ = played(method, aims(5, 5, 5, -5, -5), 3)
    before, held = states[-2].consensus, states[-1].consensus
    assert set(held.columns) == {DEVICES[:3], DEVICES[3:]}
    place = held.columns.index(DEVICES[3:])
    assert held.relations["d4"].tolist() == pytest.approx(np.eye(2)[place] / np.sqrt(2))
    kept = before.multipliers[place] + 0.8 * (
        held.copies[place] - method._sums(states[-1], held.relations)[place]
    )
    assert held.multipliers[place] == pytest.approx(kept)
    assert np.abs(before.multipliers).max() > 0.1


def test_groups_are_found_anew_every_so_many_rounds():
    """d2 changes sides in round 3: it is seen after round 4, or never."""
    ends = []
    for every in (2, 0):
        method = ClusterFL(SPEC, num_groups=2, regroup_rounds=every)
        state = method.init_coordinator(np.zeros(SPEC.size, np.float32))
        sides = []
        for number in range(1, 5):
            levels = {"d0": 1, "d1": -1, "d2": 1 if number < 3 else -1}
            sent = {name: np.full(SPEC.size, level, np.float32) for name, level in levels.items()}
            updates = [(name, Update(Patch.of(one, Everything(), SPEC))) for name, one in sent.items()]
            state = method.aggregate(state, updates)
            sides.append("d0" if state.groups["d2"] == state.groups["d0"] else "d1")
        ends.append(sides)
    assert ends == [["d0", "d0", "d0", "d1"], ["d0"] * 4]


def test_who_was_not_heard_yet_is_pulled_towards_the_mean_of_all():
    method = ClusterFL(SPEC, num_groups=2, shrink=0.5, attract=0.25)
    wanted = aims(5, -5)
    (state,), found = played(method, wanted, 1, lambda number: ("d0", "d1"))
    _, tasks = method.plan(state, Round(2, ("d0", "new")), Key(2))
    assert tasks["new"].strength == 0.5
    assert tasks["new"].patch.values == pytest.approx((found["d0"] + found["d1"]) / 4, abs=1e-6)
    assert tasks["d0"].strength == pytest.approx(0.5 + 2.0 / 2)  # alone in its group: shrink + rho / 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"penalty": 0.39}, r"method.penalty: 0.39 is below 4 \* method.attract \(0.4\)"),
        ({"shrink": 1e300}, "method.shrink: .* method.penalty is above"),
    ],
)
def test_settings_that_have_no_solution_are_refused(settings, message):
    with pytest.raises(SettingError, match=message):
        create("clusterfl", SPEC, settings)
