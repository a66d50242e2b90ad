"""The roll-out of shared models: who is a canary, when a version is judged, and what liars can do."""

import math

import numpy as np
import pytest
from msgspec.structs import replace

from fleetune.coordinator.extensions.rollout import (
    Rollout,
    after_round,
    chance_of_each,
    heard,
    rolled_back,
    worse_canaries,
)
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.adoption import AdoptionSection
from fleetune.protocols.wire.release import Comparison

RULE = AdoptionSection(enabled=True, canary=0.1, watch=2)
DEVICES = [f"d{index:02d}" for index in range(30)]
KEY = Key.of("canaries")


def comparison(gain, error=0.01, new=1, old=0, num_samples=20):
    return Comparison(new, old, gain, error, num_samples)


def begun(rule=RULE, devices=DEVICES):
    rollout, line = after_round(Rollout(), 1, 0.0, devices, rule, KEY)
    assert line == ""
    return rollout


def reporting(rollout, *gains):
    """As if the first canaries had found these gains."""
    for device, gain in zip(rollout.canaries, gains, strict=False):
        rollout = heard(rollout, device, comparison(gain, new=rollout.trial, old=rollout.approved))
    return rollout


def test_canaries_are_a_share_of_the_devices_drawn_by_the_key():
    rollout = begun()
    assert (rollout.trial, len(rollout.canaries)) == (1, 3)
    assert begun() == rollout
    assert set(rollout.canaries) < set(DEVICES)
    assert len(begun(devices=DEVICES[:2]).canaries) == 1
    drawn = {after_round(Rollout(), number, 0.0, DEVICES, RULE, KEY)[0].canaries for number in range(1, 20)}
    assert len(drawn) > 10  # others for each version


def test_a_version_stands_for_so_many_rounds_and_then_goes_out_to_all():
    rollout = reporting(begun(), 0.5, -0.001, 0.5)
    waiting, line = after_round(rollout, 2, 0.0, DEVICES, RULE, KEY)
    assert (waiting, line) == (rollout, "")
    out, line = after_round(waiting, 3, 0.0, DEVICES, RULE, KEY)
    assert (out.approved, out.trial, out.reporting, out.num_approved) == (1, 3, {}, 1)
    assert line == "version 1 goes out to all: worse on 0 of 3 canaries"


def test_or_for_so_long():
    rule = replace(RULE, watch="24h")
    rollout = reporting(begun(rule), 0.5, 0.5, 0.5)
    assert after_round(rollout, 50, 86_399.0, DEVICES, rule, KEY)[0].approved == 0
    assert after_round(rollout, 2, 86_400.0, DEVICES, rule, KEY)[0].approved == 1


def test_a_version_that_is_worse_on_most_canaries_goes_to_nobody():
    rollout = replace(reporting(begun(), 0.5, 0.5, 0.5), approved=0)
    rollout, _ = after_round(rollout, 3, 0.0, DEVICES, RULE, KEY)
    rollout, line = after_round(reporting(rollout, -0.2, 0.1, -0.2), 5, 0.0, DEVICES, RULE, KEY)
    assert (rollout.approved, rollout.trial, rollout.num_stopped) == (1, 5, 1)
    assert line == "version 3 stopped after round 5: worse on 2 of 3 canaries; canaries go back to version 1"
    assert rollout.words.endswith("; version 3 stopped after round 5: worse on 2 of 3 canaries")


@pytest.mark.parametrize("lie", [-1e300, 1e300, -1e-300])
def test_fewer_than_half_of_the_canaries_stop_and_pass_nothing_by_lying(lie):
    good = dict.fromkeys("abc", comparison(0.1)) | dict.fromkeys("xy", comparison(lie, 0.0))
    bad = dict.fromkeys("abc", comparison(-0.1)) | dict.fromkeys("xy", comparison(lie, 0.0))
    assert not worse_canaries(good, 0.9)[1]
    assert worse_canaries(bad, 0.9)[1]


def test_what_is_not_of_this_version_or_not_of_a_canary_is_nothing():
    rollout = begun()
    stranger = next(one for one in DEVICES if one not in rollout.canaries)
    for device, found in [
        (stranger, comparison(-1.0)),
        (rollout.canaries[0], comparison(-1.0, new=2)),
        (rollout.canaries[0], comparison(-1.0, old=7)),
    ]:
        assert heard(rollout, device, found) is rollout


def test_canaries_that_say_nothing_are_waited_for_and_then_drawn_anew():
    rollout = reporting(begun(), 0.5)  # one of three
    assert after_round(rollout, 3, 0.0, DEVICES, RULE, KEY)[0] is rollout
    assert (
        after_round(rollout, 5, 0.0, DEVICES, RULE, KEY)[0].approved == 1
    )  # after twice the time it is enough
    silent = begun()
    again, line = after_round(silent, 5, 0.0, DEVICES, RULE, KEY)
    assert (again.trial, again.approved, again.draw) == (1, 0, 2)
    assert again.canaries != silent.canaries
    assert "none of its canaries reported" in line


def test_a_round_that_is_rolled_back_leaves_no_version():
    rollout = begun()
    assert rolled_back(rollout, 2) is rollout
    gone = rolled_back(rollout, 1)
    assert (gone.trial, gone.canaries) == (0, ())
    assert after_round(gone, 1, 0.0, DEVICES, RULE, KEY)[0].trial == 1


@pytest.mark.parametrize("count", [1, 2, 3, 10, 31])
def test_a_version_that_is_no_worse_is_stopped_as_seldom_as_said(count):
    """1,000 roll-outs of versions that are in truth as good: the canaries' gains are noise."""
    draw = np.random.default_rng(count)
    least = count // 2 + 1
    each = chance_of_each(count, least, 0.1)
    at_least = sum(math.comb(count, k) * each**k * (1 - each) ** (count - k) for k in range(least, count + 1))
    assert at_least == pytest.approx(0.1) or each == 0.5
    stopped = 0
    for _ in range(1000):
        samples = draw.normal(size=(count, 20))
        means, errors = samples.mean(1), samples.std(1, ddof=1) / math.sqrt(20)
        found = {str(n): comparison(float(means[n]), float(errors[n])) for n in range(count)}
        stopped += worse_canaries(found, 0.9)[1]
    assert 0.07 < stopped / 1000 < 0.13
