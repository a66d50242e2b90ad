"""edge-agent wipe: what an agent keeps is removed, and nothing else."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleetune.protocols.one_line import one_line_errors

if TYPE_CHECKING:
    from fleetune.edge_agent.state.state_folder import AgentFiles

_NAMED = 3


def wipe(
    state: Annotated[Path, typer.Option(help="where personal models are kept, as in run")] = Path(
        "agent-state"
    ),
    yes: Annotated[bool, typer.Option(help="do not ask")] = False,
) -> None:
    """Remove everything that agents keep in a folder, personal models too; files of others stay."""
    from fleetune.edge_agent.state.state_folder import agent_files
    from fleetune.edge_agent.state.state_folder import wipe as remove
    from fleetune.protocols.errors import StoreError

    with one_line_errors("edge-agent"):
        found = agent_files(state)
        if not found and state.exists():
            raise StoreError(f"{state}: no agent keeps anything here; name the --state that run was given")
        for one in found:
            print(_words(one))
        if not found or not (yes or typer.confirm(_question(found))):
            print("nothing was removed")
            return
        remove(state, found)
        for path in (path for one in found for path in one.foreign):
            print(f"left alone, no agent put it there: {path}")


def _words(one: "AgentFiles") -> str:
    runs = f"{len(one.runs)} run{'s' * (len(one.runs) != 1)}"
    return f"{one.folder}: {_some(runs, one.runs)}, {one.num_bytes:,} bytes"


def _some(what: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{what} ({', '.join(names[:_NAMED])}{more})" if names else what


def _question(found: "list[AgentFiles]") -> str:
    devices = _some(f"{len(found)} device{'s' * (len(found) != 1)}", [one.folder.name for one in found])
    num_runs, num_bytes = sum(len(one.runs) for one in found), sum(one.num_bytes for one in found)
    runs = f"{num_runs} run{'s' * (num_runs != 1)}"
    return f"remove all that {devices} learned in {runs}, {num_bytes:,} bytes, personal models too?"
