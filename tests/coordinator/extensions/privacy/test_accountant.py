"""Epsilon, against accountants that share no code with the one that the product uses."""

import math

import numpy as np
import pytest
from tests.helpers.errors import raises

from fleetune.coordinator.extensions.privacy.accountant import epsilon_of, most_tasks
from fleetune.protocols.errors import SettingError
from fleetune.protocols.settings.privacy import PrivacySection

CASES = [
    (z, tasks, delta, noise)
    for z in (0.5, 1.0, 4.0)
    for tasks in (1, 10, 300)
    for delta in (1e-3, 1e-6)
    for noise in ("central", "local")
]


def section(z=1.0, delta=1e-5, noise="central", **more):
    return PrivacySection(clip=0.3, noise_multiplier=z, delta=delta, noise=noise, **more)


def by_fft(shift, deviation, tasks, delta, points=2**15):
    """Epsilon by convolving the privacy loss of one task `tasks` times with an FFT.

    The loss is integrated on a grid from the two densities themselves, N(0, deviation) and N(shift,
    deviation); neither the composition of Gaussian mechanisms nor a formula for epsilon is used.
    """
    mean = shift**2 / (2 * deviation**2)
    spread = shift / deviation
    reach = tasks * mean + 40 * spread * math.sqrt(tasks) + 10
    width = 2 * reach / points
    losses = (np.arange(points) - points // 2) * width
    # the loss log(p1(x) / p0(x)) is (2 x shift - shift**2) / (2 deviation**2), for x of N(shift, deviation)
    x = (losses * 2 * deviation**2 + shift**2) / (2 * shift)
    density = np.exp(-((x - shift) ** 2) / (2 * deviation**2))
    one = density / density.sum()
    composed = np.fft.irfft(np.fft.rfft(np.fft.ifftshift(one)) ** tasks, points)
    composed = np.maximum(np.fft.fftshift(composed), 0)
    # delta(epsilon) = sum over losses above epsilon of p(loss) (1 - e^(epsilon - loss)), which falls
    low, high = 0.0, float(losses[-1])
    for _ in range(60):
        middle = (low + high) / 2
        above = losses > middle
        found = composed[above] @ (1 - np.exp(middle - losses[above]))
        low, high = (middle, high) if found > delta else (low, middle)
    return (low + high) / 2


@pytest.mark.parametrize(("z", "tasks", "delta", "noise"), CASES)
def test_epsilon_agrees_with_a_convolution_of_privacy_losses_to_one_percent(z, tasks, delta, noise):
    clip = 0.3
    # central: a step of norm `clip` or none; local: two steps of that norm in opposite directions
    shift = clip if noise == "central" else 2 * clip
    ours = epsilon_of(section(z, delta, noise), tasks)
    assert ours == pytest.approx(by_fft(shift, z * clip, tasks, delta), rel=0.01)


@pytest.mark.parametrize(("z", "tasks", "delta", "noise"), CASES)
def test_epsilon_is_below_the_bound_of_renyi_divergences_and_near_it(z, tasks, delta, noise):
    """Renyi accounting is loose by 1 to 14 % here; a wrong sensitivity would be off by a factor."""
    effective = z if noise == "central" else z / 2
    orders = 1 + np.logspace(-3, 4, 20_000)
    renyi = tasks * orders / (2 * effective**2)
    bound = (
        renyi + np.log1p(-1 / orders) - (np.log(delta) + np.log(orders)) / (orders - 1)
    ).min()  # Canonne, Kamath, Steinke 2020, proposition 12
    assert 0.8 * bound < epsilon_of(section(z, delta, noise), tasks) <= bound


def test_the_most_tasks_are_within_the_limit_and_one_more_is_not():
    for limit in (0.5, 3.0, 50.0):
        limited = section(z=2.0, max_epsilon=limit)
        if epsilon_of(limited, 1) > limit:
            continue
        most = most_tasks(limited)
        assert epsilon_of(limited, most) <= limit < epsilon_of(limited, most + 1)
    assert most_tasks(section()) is None
    assert epsilon_of(section(), 0) == 0


def test_a_limit_below_one_round_is_refused_before_the_run():
    with raises(SettingError, "privacy.max_epsilon = 1: one round already has epsilon 4.38; raise noise_"):
        most_tasks(section(max_epsilon=1.0))


def test_without_the_library_one_line_names_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting", None)
    epsilon_of.cache_clear()
    with raises(SettingError, "[privacy] needs dp-accounting, which is not installed"):
        epsilon_of(section(), 3)
