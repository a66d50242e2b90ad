"""What rounds show of ratios: a peak is found in noise, whoever lies moves it little."""

import math
from itertools import pairwise

import numpy as np
import pytest

from fleetune.coordinator.rounds.objective.evidence import CLIP, FADING, Arm, Evidence, Shown
from fleetune.protocols.method.choice import Budget
from fleetune.protocols.randomness import Key

RATIOS = (0.2, 0.4, 0.6, 0.8, 1.0)
PEAK = {0.2: -0.02, 0.4: 0.0, 0.6: 0.03, 0.8: 0.0, 1.0: -0.02}
NOISE = 0.02
BUDGETS = [Budget(ratio) for ratio in RATIOS]
ARMS = [Arm("ratio", ratio) for ratio in RATIOS]


def changed(**devices):
    """What devices showed then, and now: ratio and score."""
    return {
        name: tuple(Shown(Budget(ratio), score) for ratio, score in pair) for name, pair in devices.items()
    }


def seen(rounds, *, worth=PEAK, devices=10, noise=NOISE, liar=None):
    """What is known after rounds in which devices worked at ratios drawn for them, and how often each was."""
    rng, evidence = np.random.default_rng(0), Evidence()
    shown, drawn = {}, dict.fromkeys(RATIOS, 0)
    for number in range(rounds):
        replies = {}
        for device in map(str, range(devices)):
            worths = evidence.drawn(BUDGETS, Key.of("test").child(number, device))
            ratio = RATIOS[int(np.argmax(worths))]
            score = 0.5 + 0.1 * math.log1p(number) + worth[ratio] + 0.1 * int(device) + rng.normal(0, noise)
            replies[device] = Shown(Budget(ratio), 1e9 if device == liar and ratio == 1.0 else score)
            drawn[ratio] += 1
        changes = {device: (shown[device], now) for device, now in replies.items() if shown}
        evidence, shown = evidence.after(changes), replies
    return evidence, drawn


def test_a_peak_in_the_middle_is_found_and_worked_at():
    evidence, drawn = seen(60)
    worths, _ = evidence.worths(ARMS)
    assert RATIOS[int(np.argmax(worths))] == 0.6
    assert max(drawn, key=drawn.get) == 0.6
    assert drawn[0.6] > 0.4 * sum(drawn.values())
    assert min(drawn.values()) > 0, "each was tried"


def test_where_no_ratio_is_worth_more_none_is_thought_to_be():
    evidence, drawn = seen(60, worth=dict.fromkeys(RATIOS, 0.0))
    worths, covariance = evidence.worths(ARMS)
    assert max(abs(worths)) < 2.5 * math.sqrt(max(np.diag(covariance)))
    assert min(drawn.values()) > 0.05 * sum(drawn.values())


def test_one_that_lies_about_its_score_moves_nothing_beyond_its_share():
    honest, _ = seen(60)
    lied_to, drawn = seen(60, liar="3")
    worths, _ = lied_to.worths(ARMS)
    assert RATIOS[int(np.argmax(worths))] == 0.6
    assert max(drawn, key=drawn.get) == 0.6
    assert abs(worths - honest.worths(ARMS)[0]).max() < NOISE


@pytest.mark.parametrize("lie", [1e300, -1e300, 1.0])
def test_a_lie_counts_as_an_outlier_does(lie):
    shown = changed(**{name: ((0.2, 0.0), (0.4, 0.01 * n)) for n, name in enumerate("abcd")})
    once = Evidence().after(shown | changed(e=((0.2, 0.0), (0.4, lie))))
    assert max(map(abs, once.pull)) <= 4 * CLIP * once.noise + sum(0.01 * n for n in range(4))


def test_who_works_at_the_same_ratio_says_nothing_of_it_and_nor_does_one_device():
    same = changed(**{name: ((0.4, 0.1), (0.4, 0.1 * n)) for n, name in enumerate("abcd")})
    assert not any(Evidence().after(same).pull)
    assert Evidence().after(changed(a=((0.2, 0.1), (0.4, 0.9)))) == Evidence()


def test_what_all_gain_says_nothing():
    shown = changed(a=((0.2, 0.1), (0.4, 0.3)), b=((0.4, 0.5), (0.2, 0.7)), c=((0.2, 0.3), (0.2, 0.5)))
    assert max(map(abs, Evidence().after(shown).pull)) < 1e-12


def test_lies_do_not_pass_for_noise():
    shown = changed(**{name: ((0.2, 0.0), (0.4, 0.01 * n)) for n, name in enumerate("abcd")})
    evidence = Evidence().after(shown)
    lied_to = evidence.after(
        changed(**{name: ((0.2, 0.0), (0.4, 1e30 * n)) for n, name in enumerate("abcd")})
    )
    assert lied_to.noise <= 1.21 * evidence.noise
    assert max(map(abs, lied_to.pull)) <= max(map(abs, evidence.pull)) + 4 * CLIP * lied_to.noise


def test_a_share_of_the_local_training_is_compared_beside_the_ratio():
    """Who trains half as much gains less, and that does not speak against its ratio."""
    rng, evidence, shown = np.random.default_rng(1), Evidence(), {}
    for _ in range(60):
        budgets = {name: Budget(rng.choice((0.2, 0.4)), rng.choice((0.5, 1.0))) for name in "abcdefgh"}
        now = {
            name: Shown(one, 0.02 * one.local_work + rng.normal(0, 0.002)) for name, one in budgets.items()
        }
        evidence = evidence.after({name: (shown[name], told) for name, told in now.items() if shown})
        shown = now
    arms = [Arm("work", 0.5), Arm("work", 1.0), Arm("ratio", 0.2), Arm("ratio", 0.4)]
    half, whole, small, large = evidence.worths(arms)[0]
    assert whole - half == pytest.approx(0.01, abs=0.003)
    assert abs(large - small) < 0.002


def test_scores_that_stay_as_they_are_are_no_proof():
    """Of a model that hardly learns any more most devices' scores do not change at all."""
    told = changed(**{name: ((0.2, 0.0), (0.4, 0.01 * n)) for n, name in enumerate("abcd")})
    evidence = Evidence().after(told)
    still = {name: (now, now) for name, (_, now) in told.items()}
    for _ in range(50):
        evidence, before = evidence.after(still), evidence
        assert evidence.noise == pytest.approx(before.noise)


def test_older_rounds_fade():
    shown = changed(a=((0.2, 0.0), (0.4, 0.2)), b=((0.2, 0.0), (0.2, 0.1)), c=((0.2, 0.0), (0.2, 0.0)))
    quiet = changed(**dict.fromkeys("abc", ((0.2, 0.0), (0.2, 0.0))))
    states = [Evidence().after(shown)]
    for _ in range(3):
        states.append(states[-1].after(quiet))
    for before, after in pairwise(states):
        assert after.pull[1] == pytest.approx(FADING * before.pull[1])


def test_what_is_drawn_depends_on_the_key_and_on_what_is_known_alone():
    evidence, _ = seen(5)
    key = Key.of("fleetune", 1).child("pace", 3, "a")
    assert evidence.drawn(BUDGETS, key).tolist() == evidence.drawn(BUDGETS, key).tolist()
    assert evidence.drawn(BUDGETS, key).tolist() != evidence.drawn(BUDGETS, key.child(1)).tolist()
    assert seen(5)[0] == evidence
