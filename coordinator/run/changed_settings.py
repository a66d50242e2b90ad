"""Compares the settings that a run was begun with to those that it should continue with.

They are compared by meaning, not as text: a key that is left out equals its default, and settings that a run
ignores do not count.

Settings that only the coordinator reads when it plans or closes a round may change (`CHANGEABLE`). Settings
that devices store may not: model, method, training, data, and `deadline_s`, by which they choose their
ratios. Nor may the seed or the mode of rounds. Defaults that the run chose at its start
(`Method.defaults_of_run`, the learning rate's schedule) stay too, even when `run.rounds` is raised, because
devices store them.
"""

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from fleetune.protocols.errors import SettingError, StoreError
from fleetune.protocols.method.method import Method
from fleetune.protocols.methods import from_section, with_defaults_at_start
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.settings.rate_schedule import with_that_of_run
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.run_toml import convert
from fleetune.protocols.settings.schedule import ScheduleSection

# [method] is compared by its meaning; only `edge-sim compare` and `edge-sim paper` read the other two
_IGNORED = ("method", "compare", "paper")
CHANGEABLE = (
    "run.rounds",
    "run.fleet",
    "round.participants",
    "round.over_selection",
    "round.quorum",
    "round.start_with",
    "round.prefer",
    "round.deadline_slack",
    "round.max_share",
    "round.robust",
    "round.max_hostile",
    "round.quarantine",
    "objective.at_most",
    *(f"schedule.{key}" for key in ScheduleSection.__struct_fields__),
)
Differences = dict[str, tuple[Any, Any]]


def stored_settings(data: bytes, folder: Path) -> RunSettings:
    """Read the settings from a run's store.

    Raises:
        StoreError: the settings have an unknown key or a value that is not allowed.
    """
    try:
        return convert(msgspec.json.decode(data), RunSettings)
    except SettingError as problem:
        raise StoreError(
            f"{folder} holds settings that this program cannot read ({problem}): install the version of"
            " fleetune that began the run, or set another run.name (--fresh deletes the run)"
        ) from None


def going_on(before: RunSettings, now: RunSettings) -> RunSettings:
    """Complete `now` with the run's stored choices of method and learning-rate schedule, where `now` leaves
    them open.

    Raises:
        SettingError: the method does not exist.
    """
    if not now.fleet.devices:
        now = replace(now, fleet=replace(now.fleet, devices=before.fleet.devices))
    now = replace(now, training=with_that_of_run(now.training, before.training))
    if before.method["name"] != now.method["name"]:
        return now
    return replace(now, method=with_defaults_at_start(now.method, before.method))


def differences(before: RunSettings, now: RunSettings, spec: ModelSpec) -> Differences:
    """Differing settings by key, e.g. `round.quorum`, each with its old and its new value.

    Args:
        before: settings that the run was begun with.
        now: settings that it should continue with.
        spec: the model; a method reads its own section for it.

    Raises:
        SettingError: the method's section is wrong.
    """
    was, wanted = _flat(before), _flat(now)
    if before.method["name"] == now.method["name"]:
        was.update(_method_keys(from_section(before.method, spec)))
        wanted.update(_method_keys(from_section(now.method, spec)))
    else:
        was["method.name"], wanted["method.name"] = before.method["name"], now.method["name"]
    pairs = {key: (was.get(key), wanted.get(key)) for key in {**was, **wanted}}
    return {key: (old, new) for key, (old, new) in pairs.items() if old != new}


def is_raised(before: RunSettings, now: RunSettings) -> bool:
    """True if the new settings allow more rounds than before."""
    last, new_last = before.run.last_round, now.run.last_round
    return last is not None and (new_last is None or new_last > last)


def check_changes(found: Differences, rounds_done: int, folder: Path) -> None:
    """Raise SettingError if a run in progress cannot continue with these differences.

    Args:
        found: differences between the old and the new settings.
        rounds_done: number of closed rounds.
        folder: the run's folder.
    """
    firm = {key: values for key, values in found.items() if key not in CHANGEABLE}
    if firm:
        raise SettingError(
            f"{folder} holds a run with other settings: {difference_words(firm)}; put that back to go on "
            "with it, or set another run.name (--fresh deletes the run)"
        )
    _, rounds = found.get("run.rounds", (0, rounds_done))
    if rounds != "open" and rounds < rounds_done:
        raise SettingError(
            f"run.rounds = {rounds}: {folder} has closed {rounds_done} rounds already; set at least"
            f" {rounds_done}"
        )


def difference_words(found: Differences) -> str:
    """E.g. `round.quorum was 1 and is 2 now`."""
    return ", ".join(f"{key} was {_said(was)} and is {_said(now)} now" for key, (was, now) in found.items())


def _flat(section: msgspec.Struct, path: str = "") -> dict[str, Any]:
    """Values by key of a section and of the sections in it."""
    found: dict[str, Any] = {}
    for name in section.__struct_fields__:
        value = getattr(section, name)
        if name not in _IGNORED:
            inner = isinstance(value, msgspec.Struct)
            found |= _flat(value, f"{path}{name}.") if inner else {f"{path}{name}": value}
    return found


def _method_keys(method: Method[Any, Any, Any, Any]) -> dict[str, Any]:
    fields = dataclasses.fields(method)  # type: ignore[arg-type]
    return {f"method.{one.name}": getattr(method, one.name) for one in fields if one.name != "spec"}


def _said(value: Any) -> str:
    return "not set" if value is None else msgspec.json.encode(value).decode()
