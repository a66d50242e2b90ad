"""The owner's policy: when a device may train (power, battery, traffic, heat), and the limits of a round."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta
from msgspec.structs import replace

from fleetune.firmware_profiles import UNKNOWN, Board
from fleetune.protocols.bounds import Positive
from fleetune.protocols.conditions import Conditions
from fleetune.protocols.errors import SettingError
from fleetune.protocols.settings.run_toml import convert
from fleetune.protocols.settings.section import Settings
from fleetune.protocols.toml_text import read_toml

COOL_BY = 5.0  # degrees below the limit at which training resumes after heat has stopped it
MEMORY_SHARE = 0.9  # share of the memory limit; the system ends a process that takes all of it


class Policy(Settings, frozen=True):
    """A policy.toml, or options of the command line with the same names; None for no limit.

    Attributes:
        charging_only: train only on mains power, with or without a battery.
        unmetered_only: do not train while traffic costs money.
        max_celsius: limit for the hottest thermal zone. Above it the board must cool by COOL_BY.
        min_battery: least charge on battery power, in percent.
        max_battery_percent_per_hour: charge that training may use on battery power.
        max_memory_mb: memory of the agent's process, in 1e6 bytes.
        nice: added to the process's niceness, 0..19.
        ratio: largest share of the model to train and send.
    """

    charging_only: bool = False
    unmetered_only: bool = False
    max_celsius: Annotated[float, Meta(ge=20, le=120)] | None = None
    min_battery: Annotated[float, Meta(ge=0, le=100)] | None = None
    max_battery_percent_per_hour: Annotated[float, Meta(gt=0, le=100)] | None = None
    max_memory_mb: Positive | None = None
    nice: Annotated[int, Meta(ge=0, le=19)] = 0
    ratio: Annotated[float, Meta(gt=0, le=1)] | None = None

    def at_most(self, ratio: float | None) -> "Policy":
        """Return the policy in a run that assigns a ratio; the owner's own limit may be lower."""
        wished = [one for one in (self.ratio, ratio) if one is not None]
        return replace(self, ratio=min(wished, default=None))


@dataclass(frozen=True)
class Limits:
    """Limits of a round; None for no limit."""

    deadline_s: float | None = None
    memory_bytes: int | None = None
    joules: float | None = None


def read_policy(path: Path | None, options: Mapping[str, Any]) -> Policy:
    """Read a policy file; `options` take precedence over the file. Options that are None were not given.

    Raises:
        SettingError: the file cannot be read (see `read_toml`), or a key is unknown or wrong.
    """
    content = {} if path is None else read_toml(path)
    given = {key: value for key, value in options.items() if value is not None}
    try:
        return convert({**content, **given}, Policy)
    except SettingError as problem:
        raise SettingError(f"{'' if path is None else f'{path}: '}{problem}") from None


def reason_not_to_train(
    policy: Policy, conditions: Conditions, board: Board, *, waiting: bool = False
) -> str | None:
    """Return why the policy forbids training now, in one line; None if training is allowed.

    A condition of the policy that the board cannot measure counts as not met.

    Args:
        policy: the owner's policy.
        conditions: the board's present conditions.
        board: has the battery's capacity.
        waiting: training has already stopped, so the temperature must fall COOL_BY below its limit.
    """
    return (
        _power_objection(policy, conditions, board)
        or _traffic_objection(policy, conditions)
        or _heat_objection(policy, conditions, waiting=waiting)
    )


def limits_of(
    deadline_s: float | None,
    conditions: Conditions,
    policy: Policy,
    board: Board,
    *,
    period_s: float | None = None,
) -> Limits:
    """Return the limits of a round: its deadline, the board's present memory, and the owner's limits.

    Args:
        deadline_s: deadline of a round.
        conditions: the board's present conditions.
        policy: the owner's policy.
        board: has the memory, if that cannot be read, and the battery's capacity.
        period_s: seconds between the starts of two rounds of this device, for the use of its battery. None:
            unknown; `deadline_s` is used.
    """
    fitted = None if board.name == UNKNOWN else board.memory_bytes
    usable = fitted if conditions.memory_bytes is None else conditions.memory_bytes
    memory = [
        None if usable is None else MEMORY_SHARE * usable,
        None if policy.max_memory_mb is None else policy.max_memory_mb * 1e6,
    ]
    return Limits(
        deadline_s=deadline_s,
        memory_bytes=min((int(limit) for limit in memory if limit is not None), default=None),
        joules=_battery_joules(conditions, policy, board, deadline_s if period_s is None else period_s),
    )


def _battery_joules(
    conditions: Conditions, policy: Policy, board: Board, period_s: float | None
) -> float | None:
    """Return the joules that the battery may give in `period_s`. A Wh is 3600 J; the limit is per hour."""
    percent = policy.max_battery_percent_per_hour
    if conditions.power != "battery" or percent is None or board.battery_wh is None or period_s is None:
        return None
    return percent / 100 * board.battery_wh * period_s


def _power_objection(policy: Policy, now: Conditions, board: Board) -> str | None:
    keys = ("charging_only", "min_battery", "max_battery_percent_per_hour")
    asked = [key for key in keys if getattr(policy, key) not in (None, False)]
    if not asked or now.power in ("mains", "charging"):
        return None
    if now.power is None:
        has_none = board.name != UNKNOWN and board.battery_wh is None
        return None if has_none else _unread(asked[0], "the power source")
    if policy.charging_only:
        charge = "" if now.battery is None else f", {100 * now.battery:.3g} % charged"
        return f"charging_only: the board runs on battery{charge}"
    if policy.max_battery_percent_per_hour is not None and board.battery_wh is None:
        key = "max_battery_percent_per_hour"
        return (
            f"{key} is set, but the battery's capacity is unknown; set battery_wh in a profile of your own"
            f" (--board FILE), or leave out {key}"
        )
    return _charge_objection(policy.min_battery, now.battery)


def _charge_objection(least: float | None, charge: float | None) -> str | None:
    if least is None:
        return None
    if charge is None:
        return _unread("min_battery", "the battery's charge")
    low = 100 * charge < least
    return f"min_battery: {100 * charge:.3g} % charged, at least {least:g} %" if low else None


def _traffic_objection(policy: Policy, now: Conditions) -> str | None:
    if not policy.unmetered_only or now.metered is False:
        return None
    if now.metered is None:
        return _unread("unmetered_only", "the cost of traffic")
    return "unmetered_only: the network is metered"


def _heat_objection(policy: Policy, now: Conditions, *, waiting: bool) -> str | None:
    limit = policy.max_celsius
    if limit is None:
        return None
    if now.celsius is None:
        return _unread("max_celsius", "the board's temperature")
    if waiting and limit - COOL_BY < now.celsius <= limit:
        return f"max_celsius: {now.celsius:.1f} °C, training resumes below {limit - COOL_BY:g} °C"
    return f"max_celsius: {now.celsius:.1f} °C, at most {limit:g} °C" if now.celsius > limit else None


def _unread(key: str, what: str) -> str:
    return f"{key} is set, but {what} cannot be read; `edge-agent profile` says why, or leave out {key}"
