"""Checks the board's sensors against the needs of the owner's policy."""

from collections.abc import Iterator
from pathlib import Path

from fleetune.edge_agent.budget.owner_policy import Policy, reason_not_to_train
from fleetune.edge_agent.doctor.check_result import CheckResult
from fleetune.edge_agent.probes.board_measurement import Figure, condition_figures
from fleetune.edge_agent.probes.conditions import read_conditions
from fleetune.edge_agent.probes.files_and_commands import Run, run_command
from fleetune.edge_agent.probes.show import readable
from fleetune.firmware_profiles import Board
from fleetune.protocols.errors import said_and_remedy

_SENSORS = {  # name in `Conditions`: label, and the policy's keys that need the sensor
    "power": ("power supply", ("charging_only", "min_battery", "max_battery_percent_per_hour")),
    "battery": ("battery charge", ("min_battery",)),
    "celsius": ("temperature", ("max_celsius",)),
    "throttled": ("throttled", ()),
    "metered": ("metered traffic", ("unmetered_only",)),
    "watts": ("draw", ()),
}


def examine(root: Path, policy: Policy, board: Board, run: Run = run_command) -> Iterator[CheckResult]:
    """Yield a result for each sensor, then one for the policy at present.

    Args:
        root: folder in which `proc` and `sys` lie.
        policy: the owner's policy.
        board: the board's profile.
        run: runs external commands.
    """
    figures, now, failed = condition_figures(root, run), read_conditions(root, run), False
    for name, (label, keys) in _SENSORS.items():
        needed = [key for key in keys if reason_not_to_train(_policy_of(policy, key), now, board) is not None]
        key = needed[0] if needed and figures[name].value is None else None
        failed |= key is not None
        yield _sensor(label, name, figures[name], key)
    if (
        policy.max_battery_percent_per_hour is not None
        and board.battery_wh is None
        and now.power == "battery"
    ):
        failed = True
        found, remedy = said_and_remedy(reason_not_to_train(policy, now, board) or "")
        yield CheckResult("fail", "battery capacity", found, remedy)
    if not failed:
        yield _allowed(reason_not_to_train(policy, now, board))


def _policy_of(policy: Policy, key: str) -> Policy:
    """A policy with only one key of another."""
    return Policy(**{key: getattr(policy, key)})


def _sensor(label: str, name: str, figure: Figure, key: str | None) -> CheckResult:
    """The result for a sensor. `key` of the policy needs the sensor; None: no key does."""
    if figure.value is not None:
        return CheckResult("ok", label, readable(name, figure))
    if key is None:
        return CheckResult("ok", label, f"unknown ({figure.note}); the policy does not need it")
    option = f"--{key.replace('_', '-')}"
    remedy = (
        f"without it the agent never trains: make it readable for the agent's user, or leave out {option}"
    )
    return CheckResult("fail", label, f"unknown ({figure.note}), and {key} needs it", remedy)


def _allowed(problem: str | None) -> CheckResult:
    if problem is None:
        return CheckResult("ok", "policy", "training is allowed now")
    remedy = "nothing if this is what you want: the agent waits until training is allowed"
    return CheckResult("warn", "policy", f"the agent would not train now: {problem}", remedy)
