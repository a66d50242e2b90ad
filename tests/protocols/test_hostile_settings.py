"""Whatever stands at a key of run.toml, it is taken or refused in one line; nothing infinite gets in."""

import copy
import math
from dataclasses import replace

import msgspec
import pytest

import fleetune.tools.simulator.availability
from fleetune.edge_agent.budget.owner_policy import Policy
from fleetune.edge_agent.datasets.sources import load
from fleetune.protocols.errors import FleetuneError, SettingError
from fleetune.protocols.settings.device import DataSection, ModelSection, TrainingSection
from fleetune.protocols.settings.round import RoundSection
from fleetune.protocols.settings.run import RunSection
from fleetune.protocols.settings.run_toml import convert, parse_run
from fleetune.protocols.settings.simulation import FleetSection, Partition, WirelessSection
from fleetune.tools.simulator.caller_samples import CallerSamples
from fleetune.tools.simulator.device_specs import check_counts, device_specs
from fleetune.tools.simulator.partitioned_data import PartitionedData
from fleetune.tools.simulator.runner import simulate

BASE = {
    "run": {"name": "h", "rounds": 1},
    "model": {"name": "mlp", "input_shape": [1, 8, 8], "num_classes": 10},
    "method": {"name": "fedspu"},
    "data": {"source": "digits", "partition": {"samples": 20}},
    "fleet": {"devices": 2},
}
SECTIONS = {
    "run": RunSection,
    "model": ModelSection,
    "data": DataSection,
    "data.partition": Partition,
    "training": TrainingSection,
    "round": RoundSection,
    "fleet": FleetSection,
    "fleet.wireless": WirelessSection,
    "fleet.policy": Policy,
}
KEYS = [f"{section}.{key}" for section, kind in SECTIONS.items() for key in kind.__struct_fields__]
HOSTILE = [
    *(math.inf, -math.inf, math.nan, 0, -1, 1, 2, 3, 0.5, -0.0, 1e308, -1e308, 5e-324, 2**63, 10**30),
    *("", "x", "a/b", "\0", "a\nb", "x" * 10_000, [], [0], [math.nan], [1, 2], [2, 1], [math.inf] * 2),
    *({}, {"x": 1}, {"x": 2**40}, {"phone-low": 2**31 - 1}, {"phone-low": 10**6}, {"4g": 10**9}),
    *([10**9] * 3, True, False),
]


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def with_value(key, value):
    content = copy.deepcopy(BASE)
    *sections, name = key.split(".")
    place = content
    for section in sections:
        place = place.setdefault(section, {})
    place[name] = value
    return content


def finite(value):
    """Whether every number in a structure is."""
    if isinstance(value, dict | list | tuple):
        return all(map(finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def refusal(content, digits):
    """Of the settings, or of dealing their fleet and data; "" if they are taken."""
    try:
        settings = parse_run(content)
        convert(settings.fleet.policy, Policy, "fleet.policy")
        assert finite(msgspec.to_builtins(without_policy(settings)))
        device_specs(settings.fleet, settings.run.seed)
        PartitionedData.of_run(settings, CallerSamples(digits))._rows  # noqa: B018 - deals them
    except FleetuneError as problem:
        return str(problem)
    return ""


def without_policy(settings):
    """Its own section has been read."""
    return msgspec.structs.replace(settings, fleet=msgspec.structs.replace(settings.fleet, policy={}))


@pytest.mark.parametrize("key", KEYS)
def test_any_value_of_a_key_is_taken_or_refused_in_one_line(key, digits):
    for value in HOSTILE:
        assert "\n" not in refusal(with_value(key, value), digits), value


@pytest.mark.parametrize("kind", ["dirichlet", "mix", "alpha-rho"])
def test_any_concentration_deals(kind, digits):
    for alpha in (5e-324, 1e-12, 1e-3, 1e3, 1e15):
        content = with_value("data.partition", {"kind": kind, "alpha": alpha, "samples": 20})
        settings = parse_run(content)
        assert all(
            len(train) + len(test) >= 2
            for train, test in PartitionedData.of_run(settings, CallerSamples(digits))._rows
        ), alpha


def simulated(content):
    settings = parse_run(content)
    check_counts(settings.round, settings.fleet.devices)
    return device_specs(settings.fleet, settings.run.seed)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("training.learning_rate", math.inf, r"training.learning_rate: expected `float` <= "),
        ("training.learning_rate", math.nan, r"training.learning_rate"),
        ("round.over_selection", math.inf, r"round.over_selection: expected `float` <= 1000"),
        ("round.quorum", 3, r"round.quorum = 3 is more than fleet.devices = 2"),
        ("round.start_with", 3, r"round.start_with = 3 is more than fleet.devices = 2"),
        ("round", {"quorum": 3, "participants": 2}, r"round: quorum = 3 is more than participants = 2"),
        ("fleet.wireless", {"path_loss_exponent": 1e9}, "path_loss_exponent"),
        ("fleet.boards", {"phone-low": 2**31 - 1}, r"fleet.boards lists 2147483647 boards"),
        ("model.input_shape", [10**9] * 3, "model: input_shape has more than"),
    ],
)
def test_what_cannot_be_is_named(key, value, message):
    content = with_value(key, value)
    with pytest.raises(SettingError, match=message):
        simulated(content)


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "mix", "alpha-rho", "primary"])
def test_more_samples_a_device_than_there_are_is_one_line_with_both_numbers(kind, digits):
    content = with_value("data.partition", {"kind": kind, "samples": 5000})
    with pytest.raises(SettingError, match=r"data.partition.samples = 5000 .*has 1797 samples"):
        PartitionedData.of_run(parse_run(content), CallerSamples(digits))._rows  # noqa: B018
    few = replace(digits, x=digits.x[:50], y=digits.y[:50])
    asked = parse_run(with_value("data.partition", {"kind": kind, "samples": 51}))
    with pytest.raises(SettingError, match="has 50 samples"):
        PartitionedData.of_run(asked, CallerSamples(few))._rows  # noqa: B018


@pytest.mark.parametrize(
    ("section", "content", "message"),
    [
        (
            "fleet",
            {"devices": 2, "availability": 1e-300},
            r"availability = 1e-300: no round was closed",
        ),
        (
            "round",
            {"norm_bound": 1e-300},
            r"round 1 was tried 5 times, and updates are refused \(device-\d: .* round.norm_bound",
        ),
        ("data", {"mean": 1e15, "partition": {"samples": 20}}, "."),
    ],
)
def test_a_simulation_that_can_never_end_says_so(tmp_path, monkeypatch, section, content, message):
    monkeypatch.setattr(fleetune.tools.simulator.availability, "MAX_IDLE_PERIODS", 50)
    settings = parse_run({**BASE, section: content})
    with pytest.raises(FleetuneError, match=message):
        simulate(settings, tmp_path / "run", workers=0, fresh=True)
