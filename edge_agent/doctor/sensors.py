"""Checks that the board has the sensors that the owner's policy needs."""

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

_SENSORS = {  # name in `Conditions`: label, and the keys of the policy that need the sensor
    "power": ("power supply", ("charging_only", "min_battery", "max_battery_percent_per_hour")),
    "battery": ("battery charge", ("min_battery",)),
    "celsius": ("temperature", ("max_celsius",)),
    "throttled": ("throttled", ()),
    "metered": ("metered traffic", ("unmetered_only",)),
    "watts": ("draw", ()),
}


def examine(root: Path, policy: Policy, board: Board, run: Run = run_command) -> Iterator[CheckResult]:
    """Yield a result for each sensor, then one that says whether the policy allows training now.

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
    """Return a policy that sets only this key."""
    return Policy(**{key: getattr(policy, key)})


def _sensor(label: str, name: str, figure: Figure, key: str | None) -> CheckResult:
    """Return the result for a sensor. `key`: key of the policy that needs the sensor; None if no key does."""
    if figure.value is not None:
        return CheckResult("ok", label, readable(name, figure))
    if key is None:
        return CheckResult("ok", label, f"unknown ({figure.note}); the policy does not need it")
    option = f"--{key.replace('_', '-')}"
    remedy = f"let the agent's user read this sensor, or leave out {option}; else the agent never trains"
    return CheckResult("fail", label, f"unknown ({figure.note}), and {key} needs it", remedy)


def _allowed(problem: str | None) -> CheckResult:
    if problem is None:
        return CheckResult("ok", "policy", "training is allowed now")
    remedy = "change the policy if the agent should train now; else it waits until training is allowed"
    return CheckResult("warn", "policy", f"the agent would not train now: {problem}", remedy)
