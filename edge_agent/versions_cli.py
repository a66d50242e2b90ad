"""edge-agent models, rollback, pin and unpin: the versions of a device's deployed model."""

import json
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleetune.edge_agent.run_options import DeviceId, Fleet, StateFolder
from fleetune.edge_agent.state.defaults import STATE
from fleetune.protocols.one_line import one_line_errors

if TYPE_CHECKING:
    from fleetune.edge_agent.extensions.adoption.deployed_model import ModelRecord
    from fleetune.edge_agent.state.agent_store import AgentStore
    from fleetune.edge_agent.state.deployed_files import DeployedFiles

_DECISIONS = 8


def models(
    fleet: Fleet = None,
    device: DeviceId = None,
    state: StateFolder = STATE,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, for scripts")] = False,
) -> None:
    """List the versions of this device's model with their figures, and why each was deployed or not."""
    import rich

    with one_line_errors("edge-agent"):
        _, files = _of_device(state, fleet, device)
        rows, decided = _versions(files), _decisions(files)
        if as_json:
            print(json.dumps({"versions": rows, "decisions": decided}, indent=2))
            return
        rich.print(_version_table(rows))
        for line in _deployed_because(rows):
            print(line)
        if decided:
            rich.print(_decision_table(decided[-_DECISIONS:]))


def rollback(
    fleet: Fleet = None,
    version: Annotated[
        int | None, typer.Argument(help="number of the version; default: the one before the deployed one")
    ] = None,
    device: DeviceId = None,
    state: StateFolder = STATE,
) -> None:
    """Deploy an earlier version until a later model is no worse. See also pin."""
    with one_line_errors("edge-agent"):
        store, files = _of_device(state, fleet, device)
        number = _earlier(files) if version is None else version
        found = _serve(store, files, number)
        print(f"deployed from now on: version {number}, {found.words}")
        print(f"a later model replaces it once it is no worse; edge-agent pin {number} prevents that")


def pin(
    version: Annotated[int, typer.Argument(help="number of the version, see edge-agent models")],
    fleet: Fleet = None,
    device: DeviceId = None,
    state: StateFolder = STATE,
) -> None:
    """Keep a version deployed until unpin. The device continues to train."""
    with one_line_errors("edge-agent"):
        store, files = _of_device(state, fleet, device)
        _check_there(files, version)
        files.hold(version)
        found = _serve(store, files, version)
        print(f"deployed until edge-agent unpin: version {version}, {found.words}")


def unpin(fleet: Fleet = None, device: DeviceId = None, state: StateFolder = STATE) -> None:
    """Let the device choose its version again, from the next round on."""
    with one_line_errors("edge-agent"):
        _, files = _of_device(state, fleet, device)
        files.hold(None)
        print("no version is pinned; the next round decides which one is deployed")


def _of_device(state: Path, fleet: str | None, device: str | None) -> "tuple[AgentStore, DeployedFiles]":
    """Return the device's store and its deployed files. Raises StoreError if no model is deployed."""
    from fleetune.edge_agent.state.agent_store import AgentStore
    from fleetune.edge_agent.state.deployed_files import DeployedFiles
    from fleetune.protocols.errors import StoreError

    store = AgentStore.of(state, fleet, device)
    files = DeployedFiles.next_to(store.deployed)
    if store.deployed.read() is None and not files.numbers:
        raise StoreError(
            f"{store.folder}: this device has no deployed model yet; start it with edge-agent run"
        )
    return store, files


def _earlier(files: "DeployedFiles") -> int:
    """Return the version before the deployed one. Raises StoreError if there is none."""
    from fleetune.edge_agent.extensions.adoption.deployed_model import read_deployed
    from fleetune.protocols.errors import StoreError

    found = read_deployed(files.deployed.read())
    deployed = 0 if found is None else found.record.version
    earlier = [number for number in files.numbers if number < deployed]
    if not earlier:
        raise StoreError(f"{files.versions}: there is no version before version {deployed}")
    return earlier[-1]


def _check_there(files: "DeployedFiles", number: int) -> None:
    from fleetune.protocols.errors import StoreError

    if number not in files.numbers:
        known = ", ".join(map(str, files.numbers)) or "none: only runs with [adoption] keep versions"
        raise StoreError(f"{files.versions}: there is no version {number}; stored are {known}")


def _serve(store: "AgentStore", files: "DeployedFiles", number: int) -> "ModelRecord":
    from fleetune.edge_agent.extensions.adoption.version_files import deploy_version
    from fleetune.edge_agent.personal.publishing import Publisher
    from fleetune.protocols.errors import StoreError

    _check_there(files, number)
    found = deploy_version(files, number)
    if found is None:
        raise StoreError(f"{files.version(number).path} is damaged; choose another version")
    Publisher(store, store.device).refresh()
    return found


def _versions(files: "DeployedFiles") -> list[dict[str, Any]]:
    """One row for each version, the latest last. A deployed model without a version has a row too."""
    from fleetune.edge_agent.extensions.adoption.deployed_model import read_deployed
    from fleetune.protocols.errors import PacketError

    deployed, pinned = read_deployed(files.deployed.read()), files.pinned
    now = None if deployed is None else deployed.record.version
    rows = []
    if deployed is not None and now not in files.numbers:
        rows.append(_row(deployed.record, files.deployed.path, deployed=True, pinned=False))
    for number in files.numbers:
        path = files.version(number).path
        try:
            found = read_deployed(files.version(number).read())
        except PacketError as problem:
            rows.append({"version": number, "damaged": str(problem)})
            continue
        if found is not None:
            record = deployed.record if deployed is not None and number == now else found.record
            rows.append(_row(record, path, deployed=number == now, pinned=number == pinned))
    return rows


def _row(record: "ModelRecord", path: Path, *, deployed: bool, pinned: bool) -> dict[str, Any]:
    when = datetime.fromtimestamp(path.stat().st_mtime).astimezone()
    return {
        "version": record.version or None,
        "run": record.run,
        "round": record.round,
        "final_evaluation": record.final_evaluation,
        "local_only": record.local_only,
        "when": when.isoformat(timespec="seconds"),
        "validation_loss": record.validation_loss,
        "validation_loss_error": record.loss_error,
        "below_local_only": record.lead,
        "below_local_only_error": record.lead_error,
        "score": record.score or "accuracy",
        "score_on_own_test_samples": record.accuracy,
        "scored": record.scored,
        "deployed": deployed,
        "pinned": pinned,
        "why": record.why or None,
    }


def _decisions(files: "DeployedFiles") -> list[dict[str, Any]]:
    import msgspec

    from fleetune.edge_agent.extensions.adoption.decisions import read_decisions

    return [msgspec.structs.asdict(one) for one in read_decisions(files)]


def _version_table(rows: list[dict[str, Any]]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for head in ("version", "from", "when", "validation loss", "below local-only by", "own test samples", ""):
        table.add_column(head, overflow="fold")
    for row in rows:
        if "damaged" in row:
            table.add_row(str(row["version"]), f"damaged: {row['damaged']}")
            continue
        marks = [name for name in ("deployed", "pinned") if row[name]]
        table.add_row(
            str(row["version"] or "–"),  # noqa: RUF001 - as in every table
            _origin(row),
            str(row["when"]).replace("T", " ")[5:16],
            _with_error(row["validation_loss"], row["validation_loss_error"]),
            _with_error(row["below_local_only"], row["below_local_only_error"]),
            row["scored"] or "–",  # noqa: RUF001
            ", ".join(marks),
        )
    return table


def _deployed_because(rows: list[dict[str, Any]]) -> list[str]:
    """One line about the deployed version."""
    deployed = [row for row in rows if row.get("deployed") and row["why"]]
    return [f"version {row['version']} is deployed: {row['why']}" for row in deployed]


def _decision_table(decided: list[dict[str, Any]]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for head in ("decided in", "the fleet's loss", "below local-only by", "deployed then", "why"):
        table.add_column(head, overflow="fold")
    for one in decided:
        table.add_row(
            "final evaluation" if one["final_evaluation"] else f"round {one['round']}",
            _with_error(one["loss"], one["error"]),
            _with_error(one["lead"], one["lead_error"]),
            str(one["version"]),
            one["why"],
        )
    return table


def _origin(row: dict[str, Any]) -> str:
    when = "final evaluation" if row["final_evaluation"] else f"round {row['round']}"
    where = f"{row['run']}, {when}"
    return f"{where}, local-only" if row["local_only"] else where


def _with_error(value: float | None, error: float | None) -> str:
    if value is None:
        return "–"  # noqa: RUF001
    return f"{value:.3g}" if error is None else f"{value:.3g} ± {error:.2g}"
