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
from fleetune.protocols.settings.encoding import EncodingSection
from fleetune.protocols.settings.objective import WithinSection
from fleetune.protocols.settings.rate_schedule import with_that_of_run
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.run_toml import convert
from fleetune.protocols.settings.schedule import ScheduleSection

_IGNORED = ("compare", "paper")  # sections that only `edge-sim compare` and `edge-sim paper` read
CHANGEABLE = (
    "run.rounds",
    "run.fleet",
    "round.participants",
    "round.over_selection",
    "round.quorum",
    "round.start_with",
    "round.prefer",
    "round.max_wait",
    "round.min_battery",
    "round.deadline",
    "round.deadline_slack",
    "round.max_share",
    "objective.at_most",
    *(f"objective.within.{key}" for key in WithinSection.__struct_fields__),
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
            " fleetune that began the run, or take another run.name (--fresh deletes the run)"
        ) from None


def going_on(before: RunSettings, now: RunSettings) -> RunSettings:
    """Complete `now` with the run's stored choices of method, schedule and encodings, where `now` leaves
    them open.

    Raises:
        SettingError: the method does not exist.
    """
    encoding = before.encoding if now.encoding == EncodingSection() else now.encoding
    for key in ("compact", "quick_masks"):
        if getattr(encoding, key) is None:
            encoding = replace(encoding, **{key: getattr(before.encoding, key)})
    if not now.fleet.devices:
        now = replace(now, fleet=replace(now.fleet, devices=before.fleet.devices))
    now = replace(now, training=with_that_of_run(now.training, before.training), encoding=encoding)
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
    """True if the new settings allow more rounds than before, by their number or their budget."""
    was, is_now = before.objective.within, now.objective.within
    pairs = [(before.run.last_round, now.run.last_round)]
    pairs += [(getattr(was, key), getattr(is_now, key)) for key in was.__struct_fields__]
    return any(old is not None and (new is None or new > old) for old, new in pairs)


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
            "with it, or take another run.name (--fresh deletes the run)"
        )
    _, rounds = found.get("run.rounds", (0, rounds_done))
    if rounds != "open" and rounds < rounds_done:
        raise SettingError(
            f"run.rounds = {rounds}: {folder} has closed {rounds_done} rounds already; say at least as many"
        )


def difference_words(found: Differences) -> str:
    """E.g. `round.quorum was 1 and is 2 now`."""
    return ", ".join(f"{key} was {_said(was)} and is {_said(now)} now" for key, (was, now) in found.items())


def _flat(settings: RunSettings) -> dict[str, Any]:
    return {
        f"{section}.{key}": value
        for section in settings.__struct_fields__
        if section not in ("method", *_IGNORED)
        for key, value in _parts(getattr(settings, section))
    }


def _parts(section: msgspec.Struct) -> list[tuple[str, Any]]:
    """Keys and values of a section and of those inside it."""
    found = []
    for key in section.__struct_fields__:
        value = getattr(section, key)
        if isinstance(value, msgspec.Struct):
            found += [(f"{key}.{inner}", one) for inner, one in _parts(value)]
        else:
            found.append((key, value))
    return found


def _method_keys(method: Method[Any, Any, Any, Any]) -> dict[str, Any]:
    fields = dataclasses.fields(method)  # type: ignore[arg-type]
    return {f"method.{one.name}": getattr(method, one.name) for one in fields if one.name != "spec"}


def _said(value: Any) -> str:
    return "not set" if value is None else msgspec.json.encode(value).decode()
