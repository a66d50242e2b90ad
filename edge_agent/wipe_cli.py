"""edge-agent wipe: removes what agents store: all of it, one device, some samples, or the samples of a
day.
"""

import datetime as dt
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleetune.protocols.one_line import one_line_errors

if TYPE_CHECKING:
    from fleetune.edge_agent.joining.joined_fleet import JoinedFleet
    from fleetune.edge_agent.state.state_folder import AgentFiles
    from fleetune.edge_agent.stream.deletion import SampleFilter

_NAMED = 3
_SAMPLES_FILE = "samples.sqlite"
_LEARNED = (
    "models trained on these samples cannot unlearn them: wipe the device's models too, and start a new run"
)
_SOURCES = "samples in a watched folder or from a sensor can arrive again: remove them there too"


def wipe(
    state: Annotated[Path, typer.Option(help="folder of the personal models, as in run")] = Path(
        "agent-state"
    ),
    fleet: Annotated[str | None, typer.Option(help="remove the state of this fleet only")] = None,
    device: Annotated[str | None, typer.Option(help="remove the state of this device only")] = None,
    sample: Annotated[
        list[str] | None, typer.Option(help="only the sample with this id; may be repeated")
    ] = None,
    day: Annotated[
        str | None, typer.Option(help="only samples that arrived on this day, local time, such as 2026-05-31")
    ] = None,
    identity: Annotated[
        bool,
        typer.Option(
            "--identity",
            help="also remove the keys and certificates of edge-agent join; join again afterwards",
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="remove without asking")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, for scripts")] = False,
) -> None:
    """Remove stored data of agents in a folder, personal models too, or some of their samples.

    Other files stay. If the answer is no, nothing is removed and the exit code is 1.
    """
    from fleetune.edge_agent.joining.joined_fleet import joined_fleets
    from fleetune.edge_agent.state.state_folder import agent_files
    from fleetune.protocols.errors import SettingError, StoreError

    with one_line_errors("edge-agent"):
        joined = [
            one for one in joined_fleets(state) if fleet in (None, one.fleet) and device in (None, one.device)
        ]
        if sample and day:
            raise SettingError("--sample and --day exclude each other; give one of them")
        found = agent_files(state)
        if identity and (sample or day):
            raise SettingError("--identity is for wiping a device, not samples; leave it out")
        if not found and state.exists() and not (identity and joined):
            raise StoreError(f"{state}: no agent stores anything here; give the --state of edge-agent run")
        if found:
            found = _of(found, fleet, device)
        if sample or day:
            _wipe_samples(found, _chosen(tuple(sample or ()), day), yes=yes, as_json=as_json)
        else:
            _wipe_devices(state, found, joined if identity else [], yes=yes, as_json=as_json)
            if not identity and not as_json:
                for one in joined:
                    print(f"kept: the identity of {one.device} in fleet {one.fleet}; --identity removes it")


def _of(found: "list[AgentFiles]", fleet: str | None, device: str | None) -> "list[AgentFiles]":
    """Return the agents of a fleet and a device. Raises StoreError if there are none."""
    from fleetune.protocols.errors import StoreError

    there = [
        one
        for one in found
        if device in (None, one.folder.resolve().name) and fleet in (None, one.folder.resolve().parent.name)
    ]
    if not there:
        known = ", ".join(f"{one.folder.resolve().parent.name}/{one.folder.resolve().name}" for one in found)
        raise StoreError(f"no device {fleet or '*'}/{device or '*'} stores anything here; stored are {known}")
    return there


def _wipe_devices(
    state: Path, found: "list[AgentFiles]", joined: "list[JoinedFleet]", *, yes: bool, as_json: bool
) -> None:
    from fleetune.edge_agent.joining.joined_fleet import forget
    from fleetune.edge_agent.state.state_folder import wipe as remove

    for one in found:
        typer.echo(_words(one), err=as_json)
    wiped = [
        {
            "folder": str(one.folder),
            "runs": [*one.runs],
            "num_bytes": one.num_bytes,
            "left_alone": [str(path) for path in one.foreign],
        }
        for one in found
    ]
    if found or joined:
        _ask(_question(found, joined), yes=yes, as_json=as_json)
        remove(state, found)
        for fleet in joined:
            forget(fleet)
    if as_json:
        identities = [{"fleet": one.fleet, "device": one.device} for one in joined]
        print(json.dumps({"removed": bool(found or joined), "devices": wiped, "identities": identities}))
        return
    if not found and not joined:
        print("nothing was removed: the folder does not exist")
    for path in (path for one in found for path in one.foreign):
        print(f"not removed, because no agent wrote it: {path}")


def _chosen(names: tuple[str, ...], day: str | None) -> "SampleFilter":
    """Return the chosen samples. Raises SettingError if `day` is not a date."""
    from fleetune.edge_agent.stream.deletion import SampleFilter
    from fleetune.protocols.errors import SettingError

    if day is None:
        return SampleFilter(names)
    try:
        return SampleFilter.of_day(dt.date.fromisoformat(day))
    except (ValueError, OverflowError, OSError):
        raise SettingError(f"--day {day} is not a date; write it as in 2026-05-31") from None


def _wipe_samples(found: "list[AgentFiles]", chosen: "SampleFilter", *, yes: bool, as_json: bool) -> None:
    from contextlib import ExitStack

    from fleetune.edge_agent.stream.sample_store import SampleStore
    from fleetune.protocols.errors import StoreError

    with ExitStack() as opened:
        stores = {}
        for path in (path for one in found for path in one.files if path.name == _SAMPLES_FILE):
            stores[path] = SampleStore.open(path)
            opened.callback(stores[path].close)
        there = {path: store.matching_names(chosen) for path, store in stores.items()}
        missing = set(chosen.names).difference(*there.values())
        if missing or not any(there.values()):
            what = f"no sample {min(missing)!r}" if missing else "no sample of that day"
            raise StoreError(f"{what} is stored in {', '.join(map(str, there)) or 'any store here'}")
        for path, names in there.items():
            if names:
                typer.echo(f"{path}: {_count(len(names), 'sample')}", err=as_json)
        total = sum(map(len, there.values()))
        _ask(f"remove {_count(total, 'sample')}?", yes=yes, as_json=as_json)
        gone = {path: store.delete(chosen) for path, store in stores.items() if there[path]}
    if as_json:
        wiped = [{"folder": str(path.parent), "samples": count} for path, count in gone.items()]
        print(json.dumps({"removed": True, "devices": wiped}))
    else:
        print(f"removed {_count(sum(gone.values()), 'sample')}; {_LEARNED}\n{_SOURCES}")


def _ask(question: str, *, yes: bool, as_json: bool) -> None:
    """Return if the answer is yes. Raises typer.Exit with code 1 if it is no, or if there is no terminal."""
    try:
        agreed = yes or typer.confirm(question, err=as_json)
    except typer.Abort:  # the input has ended
        agreed = False
    if agreed:
        return
    print(json.dumps({"removed": False, "devices": []}) if as_json else "nothing was removed")
    raise typer.Exit(1)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _words(one: "AgentFiles") -> str:
    runs = f"{len(one.runs)} run{'s' * (len(one.runs) != 1)}"
    return f"{one.folder}: {_some(runs, one.runs)}, {one.num_bytes:,} bytes"


def _some(what: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{what} ({', '.join(names[:_NAMED])}{more})" if names else what


def _question(found: "list[AgentFiles]", joined: "list[JoinedFleet]") -> str:
    keys = " and ".join(f"the identity of {one.device} in fleet {one.fleet}" for one in joined)
    if not found:
        return f"remove {keys}?"
    also = f", and {keys}" if joined else ""
    devices = _some(f"{len(found)} device{'s' * (len(found) != 1)}", [one.folder.name for one in found])
    num_runs, num_bytes = sum(len(one.runs) for one in found), sum(one.num_bytes for one in found)
    runs = f"{num_runs} run{'s' * (num_runs != 1)}"
    what = f"remove everything that {devices} learned in {runs}, {num_bytes:,} bytes"
    return f"{what}, with the personal models{also}?"
