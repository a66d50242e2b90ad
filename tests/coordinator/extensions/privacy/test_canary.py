"""Attacks on the real steps of a private round: what they find must stay below epsilon.

A canary device sends the largest step that it can, in a direction that the attacker knows. The attacker knows
everything else too, and guesses from the released model whether the canary took part (central noise), or in
which of two directions it stepped (local noise). From how often the guess is right follows a lower bound of
epsilon. With a confidence of 1 - 1e-9 it must be below the accountant's epsilon.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats
from tests.conftest import tiny_spec

from fleetune.coordinator.extensions.extension import RoundUpdates
from fleetune.coordinator.extensions.privacy import noisy_mean as noisy_mean_module
from fleetune.coordinator.extensions.privacy import private_steps
from fleetune.coordinator.extensions.privacy.accountant import epsilon_of
from fleetune.coordinator.extensions.privacy.noisy_mean import noisy_mean
from fleetune.coordinator.extensions.privacy.private_steps import PrivateSteps
from fleetune.edge_agent.extensions import privacy as device_privacy
from fleetune.edge_agent.extensions.privacy import Privacy
from fleetune.protocols.method.averaging import SharedModel, Task, Update
from fleetune.protocols.methods import create
from fleetune.protocols.private_noise import secret_normal
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.privacy import PrivacySection
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Everything
from fleetune.protocols.wire.payloads import Reply

SPEC = tiny_spec()
METHOD = create("fedavg", SPEC, {})
CLIP, DELTA = 0.5, 1e-5
CHANCE = 1e-9  # of a false alarm
WEIGHTS = Key.of("weights").normal(SPEC.size).astype(np.float32)
_NORMAL = Key.of("direction").normal(SPEC.num_parameters)
DIRECTION = _NORMAL / np.linalg.norm(_NORMAL)
DEVICES = ("a", "b", "c", "canary")


def section(noise, z=1.0):
    return PrivacySection(clip=CLIP, noise_multiplier=z, delta=DELTA, noise=noise)


def update(step):
    values = WEIGHTS.copy()
    values[: SPEC.num_parameters] += step.astype(np.float32)
    return Update(Patch.of(values, Everything(), SPEC), 10)


def released(rule, canary_step):
    """The model after one round, through the product's own device half, coordinator half and method."""
    task = Task(Patch.of(WEIGHTS.copy(), Everything(), SPEC))
    device = Privacy(rule, SPEC, None, simulated=False)
    steps = {name: np.zeros(SPEC.num_parameters) for name in DEVICES} | {"canary": canary_step}
    replies = {
        name: Reply(name, 1, 1, False, None, device.outgoing(SimpleNamespace(), task, update(step)))
        for name, step in steps.items()
    }
    round_ = RoundUpdates(1, DEVICES, None, dict.fromkeys(DEVICES, task), replies.__getitem__)
    extension = PrivateSteps(rule, SPEC, SimpleNamespace(members={}))
    weighed = extension.weigh(iter(replies.values()), round_)
    pairs = ((reply.device, reply.update) for reply in weighed)
    combine = () if rule.is_local else (noisy_mean(rule, secret_normal),)
    return METHOD.aggregate(SharedModel(WEIGHTS), pairs, *combine).weights


def seen(rule, factor, runs, rounds=1):
    """What the attacker measures: the sum of the steps along the canary's direction, in units of the clip.

    The mean over the rounds, times the root of their number, so that one round's noise has deviation z.
    """
    found = np.zeros(runs)
    for number in range(runs):
        for _ in range(rounds):
            model = released(rule, factor * CLIP * DIRECTION)[: SPEC.num_parameters].astype(np.float64)
            found[number] += (model - WEIGHTS[: SPEC.num_parameters]) @ DIRECTION * len(DEVICES) / CLIP
    return found / np.sqrt(rounds)


def lower_bounds(without, with_, thresholds=(0.0, 0.5, 1.0, 1.5, 2.0, 3.0)):
    """The largest lower bounds of epsilon: of any mechanism, and if the noise is Gaussian.

    Clopper-Pearson bounds of both rates, for all thresholds at once with the confidence 1 - CHANCE.
    """
    tail, runs = CHANCE / (2 * len(thresholds)), without.size
    plain, gaussian = 0.0, 0.0
    for threshold in thresholds:
        false, true = int((without > threshold).sum()), int((with_ > threshold).sum())
        most_false = stats.beta.isf(tail, false + 1, runs - false) if false < runs else 1.0
        least_true = stats.beta.ppf(tail, true, runs - true + 1) if true else 0.0
        if least_true > DELTA and most_false < 1:
            plain = max(plain, math.log((least_true - DELTA) / most_false))
            distance = float(stats.norm.ppf(least_true) - stats.norm.ppf(most_false))
            if distance > 0:
                gaussian = max(gaussian, epsilon_at(distance))
    return plain, gaussian


def epsilon_at(distance):
    """Epsilon of two normal distributions of deviation 1 at this distance, by bisection of delta(epsilon)."""
    low, high = 0.0, 1e4
    for _ in range(80):
        middle = (low + high) / 2
        first = stats.norm.cdf(distance / 2 - middle / distance)
        second = middle + stats.norm.logcdf(-distance / 2 - middle / distance)
        low, high = (middle, high) if first - math.exp(min(second, 0.0)) > DELTA else (low, middle)
    return high


def audit(rule, runs, rounds=1):
    """Lower bounds of epsilon from models with central noise: the canary's step, or a step of zero."""
    return lower_bounds(seen(rule, 0.0, runs, rounds), seen(rule, 1.0, runs, rounds))


def message_audit(rule, runs):
    """The same from messages with local noise: a step in one direction, or in the opposite one."""
    task = Task(Patch.of(WEIGHTS.copy(), Everything(), SPEC))
    device = Privacy(rule, SPEC, None, simulated=False)

    def measured(factor):
        found, trained = np.empty(runs), update(3 * factor * CLIP * DIRECTION)
        for number in range(runs):
            sent = device.outgoing(SimpleNamespace(), task, trained).patch.values
            found[number] = (sent.astype(np.float64) - WEIGHTS[: SPEC.num_parameters]) @ DIRECTION / CLIP
        return found

    return lower_bounds(measured(-1.0), measured(1.0))


RUNS = 4000


def test_a_canary_in_the_model_with_central_noise_is_found_no_better_than_epsilon_says():
    rule = section("central", 1.0)
    plain, gaussian = audit(rule, RUNS)
    epsilon = epsilon_of(rule, 1)
    assert 0.1 < plain < epsilon
    assert epsilon / 2 < gaussian < epsilon, "the attack is strong enough to find noise that is missing"


def test_a_canary_in_a_message_with_local_noise_is_found_no_better_than_epsilon_says():
    rule = section("local", 2.0)
    plain, gaussian = message_audit(rule, RUNS)
    epsilon = epsilon_of(rule, 1)
    assert 0.1 < plain < epsilon
    assert epsilon / 2 < gaussian < epsilon


def no_noise(monkeypatch):
    monkeypatch.setattr(noisy_mean_module, "_CHUNK", 10**9)
    monkeypatch.setattr(noisy_mean_module._NoisySum, "over", lambda self, previous: self._mean.over(previous))
    unnoised = device_privacy.clipped
    monkeypatch.setattr(
        device_privacy, "noised", lambda values, start, clip, _, __: unnoised(values, start, clip)
    )


def noise_of_the_mean(monkeypatch):
    """The noise that a mean of four needs, added to their sum or to each: a quarter of what is due."""
    whole = secret_normal

    def quarter(count, first=0):
        return whole(count, first) / 4

    monkeypatch.setitem(globals(), "secret_normal", quarter)
    monkeypatch.setattr(device_privacy, "secret_normal", quarter)


def no_clipping(monkeypatch):
    monkeypatch.setattr(private_steps, "clipped", lambda values, start, clip: values)
    monkeypatch.setattr(device_privacy, "clipped", lambda values, start, clip: values)
    monkeypatch.setattr(
        device_privacy,
        "noised",
        lambda values, start, clip, deviation, draw: (values + deviation * draw(values.size, 0)).astype("f4"),
    )


@pytest.mark.parametrize("fault", [no_noise, noise_of_the_mean], ids=lambda one: one.__name__)
@pytest.mark.parametrize("noise", ["central", "local"])
def test_the_attack_finds_a_planted_fault(fault, noise, monkeypatch):
    fault(monkeypatch)
    rule = section(noise, 2.0)
    plain, gaussian = audit(rule, RUNS // 4) if noise == "central" else message_audit(rule, RUNS // 4)
    assert max(plain, gaussian) > epsilon_of(rule, 1)


def test_the_attack_finds_that_nothing_is_clipped(monkeypatch):
    no_clipping(monkeypatch)
    rule = section("local", 2.0)
    assert max(message_audit(rule, RUNS // 4)) > epsilon_of(rule, 1)


@pytest.mark.nightly
@pytest.mark.parametrize("noise", ["central", "local"])
def test_with_many_more_runs_the_bound_comes_near_epsilon_and_stays_below(noise):
    rule = section(noise, 1.0 if noise == "central" else 2.0)
    _, gaussian = audit(rule, 100_000) if noise == "central" else message_audit(rule, 100_000)
    assert 0.85 * epsilon_of(rule, 1) < gaussian < epsilon_of(rule, 1)


@pytest.mark.nightly
def test_over_several_rounds_the_bound_stays_below_what_they_add_up_to():
    rule = section("central", 2.0)
    _, gaussian = audit(rule, 20_000, rounds=4)
    assert epsilon_of(rule, 1) < gaussian < epsilon_of(rule, 4), "one round alone would not explain it"
