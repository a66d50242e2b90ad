"""What the board's sensors tell, held against what its owner's policy needs to know."""

from collections.abc import Iterator
from pathlib import Path

from fleetune.edge_agent.budget.owner_policy import Policy, objection
from fleetune.edge_agent.doctor.finding import Finding
from fleetune.edge_agent.probes.board_measurement import Figure, condition_figures
from fleetune.edge_agent.probes.conditions import read_conditions
from fleetune.edge_agent.probes.files_and_commands import Run, run_command
from fleetune.edge_agent.probes.show import readable
from fleetune.firmware_profiles import Board

_SENSORS = {  # name in `Conditions`: for people, and what in a policy cannot be judged without it
    "power": ("power supply", ("charging_only", "min_battery", "max_battery_percent_per_hour")),
    "battery": ("battery charge", ("min_battery",)),
    "celsius": ("temperature", ("max_celsius",)),
    "throttled": ("throttled", ()),
    "metered": ("metered traffic", ("unmetered_only",)),
    "watts": ("draw", ()),
}


def examine(root: Path, policy: Policy, board: Board, run: Run = run_command) -> Iterator[Finding]:
    """A finding for each sensor, then whether the policy lets the agent train just now.

    Args:
        root: folder in which `proc` and `sys` lie.
        policy: of the owner.
        board: its profile.
        run: how external commands are run.
    """
    figures, now, failed = condition_figures(root, run), read_conditions(root, run), False
    for name, (label, keys) in _SENSORS.items():
        alone = Policy(**{key: getattr(policy, key) for key in keys})
        problem = objection(alone, now, board) if figures[name].value is None else None
        failed |= problem is not None
        yield _told(label, name, figures[name], problem)
    if (
        policy.max_battery_percent_per_hour is not None
        and board.battery_wh is None
        and now.power == "battery"
    ):
        failed = True
        found, _, mend = str(objection(policy, now, board)).partition("; ")
        yield Finding("fail", "battery capacity", found, mend)
    if not failed:
        yield _allowed(objection(policy, now, board))


def _told(label: str, name: str, figure: Figure, problem: str | None) -> Finding:
    if figure.value is not None:
        return Finding("ok", label, readable(name, figure))
    if problem is None:
        return Finding("ok", label, f"unknown ({figure.note}); the policy can do without it")
    found, _, _ = problem.partition("; ")
    key = found.partition(" ")[0]
    option = f"--{key.replace('_', '-')}"
    mend = f"without it the agent never trains: make it readable for the agent's user, or leave out {option}"
    return Finding("fail", label, f"unknown ({figure.note}), and {key} needs it", mend)


def _allowed(problem: str | None) -> Finding:
    if problem is None:
        return Finding("ok", "policy", "nothing is against training now")
    mend = "nothing, if this is as you wish: the agent waits, and trains when it may"
    return Finding("warn", "policy", f"the agent would not train now: {problem}", mend)
