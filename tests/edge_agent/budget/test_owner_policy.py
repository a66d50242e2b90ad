"""The owner decides when a device trains, and what a round may take."""

from dataclasses import replace

import pytest

from fleetune import firmware_profiles
from fleetune.edge_agent.budget.owner_policy import (
    COOL_BY,
    Policy,
    limits_of,
    read_policy,
    reason_not_to_train,
)
from fleetune.protocols.conditions import UNKNOWN, Conditions
from fleetune.protocols.errors import SettingError

PI = firmware_profiles.load("raspberry-pi-4b")
PHONE = replace(firmware_profiles.load("phone-mid"), battery_wh=15.0)
GENERIC = firmware_profiles.load("generic")
ANYTHING = Policy()
ON_BATTERY = Conditions(power="battery", battery=0.62, celsius=35.0, metered=False)


def test_without_a_policy_nothing_is_against_training():
    for conditions in (UNKNOWN, ON_BATTERY, Conditions(celsius=95.0, throttled=True, metered=True)):
        assert reason_not_to_train(Policy(), conditions, GENERIC) is None
        assert reason_not_to_train(Policy(), conditions, GENERIC, waiting=True) is None


@pytest.mark.parametrize(
    ("policy", "conditions", "reason"),
    [
        ({"charging_only": True}, {"power": "battery"}, "charging_only: the board runs on battery"),
        (
            {"charging_only": True},
            {"power": "battery", "battery": 0.62},
            "charging_only: the board runs on battery, 62 % charged",
        ),
        ({"charging_only": True}, {"power": "charging"}, None),
        ({"charging_only": True}, {"power": "mains"}, None),
        (
            {"min_battery": 30},
            {"power": "battery", "battery": 0.295},
            "min_battery: 29.5 % charged, at least 30 %",
        ),
        ({"min_battery": 30}, {"power": "battery", "battery": 0.3}, None),
        ({"min_battery": 30}, {"power": "charging", "battery": 0.05}, None),
        ({"min_battery": 30}, {"power": "mains"}, None),
        ({"unmetered_only": True}, {"metered": True}, "unmetered_only: the network is metered"),
        ({"unmetered_only": True}, {"metered": False}, None),
        ({"max_celsius": 40}, {"celsius": 40.2}, "max_celsius: 40.2 °C, at most 40 °C"),
        ({"max_celsius": 40}, {"celsius": 40.0}, None),
        ({"max_battery_percent_per_hour": 2}, {"power": "battery"}, None),
        (
            {"max_battery_percent_per_hour": 2, "min_battery": 30},
            {"power": "battery", "battery": 0.2},
            "min_battery",
        ),
        ({"charging_only": True, "max_celsius": 40}, {"power": "mains", "celsius": 50.0}, "max_celsius"),
    ],
)
def test_the_policy_is_held_against_the_conditions(policy, conditions, reason):
    found = reason_not_to_train(Policy(**policy), Conditions(**conditions), PHONE)
    assert found == reason or (reason in ("min_battery", "max_celsius") and found.startswith(reason))


@pytest.mark.parametrize(
    ("policy", "conditions", "what"),
    [
        ({"charging_only": True}, {}, "the power source"),
        ({"min_battery": 30}, {"battery": 0.9}, "the power source"),
        ({"min_battery": 30}, {"power": "battery"}, "the battery's charge"),
        ({"max_battery_percent_per_hour": 2}, {}, "the power source"),
        ({"unmetered_only": True}, {}, "the cost of traffic"),
        ({"max_celsius": 40}, {}, "the board's temperature"),
    ],
)
def test_what_the_policy_asks_for_and_cannot_be_read_is_an_objection(policy, conditions, what):
    (key,) = policy
    found = reason_not_to_train(Policy(**policy), Conditions(**conditions), PHONE)
    assert found == (
        f"{key} is set, but {what} cannot be read; `edge-agent profile` says why, or leave out {key}"
    )


def test_a_share_of_a_battery_of_unknown_size_cannot_be_kept():
    board = replace(PHONE, battery_wh=None)
    policy = Policy(max_battery_percent_per_hour=2)
    found = reason_not_to_train(policy, ON_BATTERY, board)
    assert "the battery's capacity is unknown; set battery_wh" in found
    assert "\n" not in found
    assert reason_not_to_train(policy, replace_power(ON_BATTERY, "charging"), board) is None


def replace_power(conditions, power):
    return Conditions(power=power, battery=conditions.battery)


def test_after_heat_the_board_must_cool_before_it_trains_again():
    policy = Policy(max_celsius=40)
    now = [Conditions(celsius=celsius) for celsius in (40.5, 38.0, 40 - COOL_BY + 0.1, 40 - COOL_BY)]
    assert [reason_not_to_train(policy, one, PI) is None for one in now] == [False, True, True, True]
    found = [reason_not_to_train(policy, one, PI, waiting=True) for one in now]
    assert [one is None for one in found] == [False, False, False, True]
    assert found[1] == "max_celsius: 38.0 °C, training resumes below 35 °C"


def test_memory_is_what_the_system_leaves_less_a_reserve_and_at_most_what_the_owner_allows():
    def memory(policy=ANYTHING, conditions=UNKNOWN, board=PI):
        return limits_of(60, conditions, policy, board).memory_bytes

    tight = Conditions(memory_bytes=512_000_000)
    assert memory(conditions=tight) == 460_800_000
    assert memory(Policy(max_memory_mb=300), tight) == 300_000_000
    assert memory(Policy(max_memory_mb=500), tight) == 460_800_000
    assert memory() == int(0.9 * PI.memory_bytes)
    assert memory(board=GENERIC) is None
    assert memory(Policy(max_memory_mb=300), board=GENERIC) == 300_000_000


def test_the_batterys_share_of_an_hour_is_spread_over_the_rounds():
    policy = Policy(max_battery_percent_per_hour=2)
    assert limits_of(60, ON_BATTERY, policy, PHONE).joules == pytest.approx(0.02 * 15 * 60)
    assert limits_of(60, ON_BATTERY, policy, PHONE, period_s=600).joules == pytest.approx(0.02 * 15 * 600)
    assert limits_of(None, ON_BATTERY, policy, PHONE).joules is None
    assert limits_of(60, Conditions(power="charging"), policy, PHONE).joules is None
    assert limits_of(60, ON_BATTERY, Policy(), PHONE).joules is None
    assert limits_of(60, UNKNOWN, Policy(), PI).deadline_s == 60


def test_a_policy_comes_from_a_file_and_options_go_before_it(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text("charging_only = true\nmax_celsius = 40\nnice = 10\n")
    assert read_policy(path, {}) == Policy(charging_only=True, max_celsius=40, nice=10)
    changed = read_policy(path, {"max_celsius": 55.0, "nice": None, "charging_only": None, "ratio": 0.4})
    assert changed == Policy(charging_only=True, max_celsius=55, nice=10, ratio=0.4)
    assert read_policy(None, {"min_battery": 20.0}) == Policy(min_battery=20)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("charging_onyl = true", "charging_onyl: unknown key; did you mean `charging_only`?"),
        ("max_celsius = 400", "max_celsius: "),
        ("max_celsius = nan", "max_celsius: "),
        ("min_battery = 'full'", "min_battery: "),
        ("max_memory_mb = 0", "max_memory_mb: "),
        ("max_battery_percent_per_hour = 0", "max_battery_percent_per_hour: "),
        ("nice = 20", "nice: "),
        ("ratio = 1.5", "ratio: "),
        ("ratio = ", "policy.toml: "),
    ],
)
def test_a_wrong_policy_is_refused_in_one_line(tmp_path, content, problem):
    path = tmp_path / "policy.toml"
    path.write_text(content)
    with pytest.raises(SettingError) as caught:
        read_policy(path, {})
    assert str(caught.value).startswith(f"{path}: ")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_option_is_refused_without_a_file():
    with pytest.raises(SettingError, match=r"^nice: "):
        read_policy(None, {"nice": -1})


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(SettingError, match="no such file"):
        read_policy(tmp_path / "policy.toml", {})
    (tmp_path / "policy.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingError, match=r"policy\.toml: "):
        read_policy(tmp_path / "policy.toml", {})
