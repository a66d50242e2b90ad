"""edge-agent join: joins a fleet with the line that `edge-coordinator invite` prints."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from fleetune.edge_agent.run_options import StateFolder
from fleetune.edge_agent.state.defaults import STATE
from fleetune.protocols.one_line import one_line_errors

VARIABLE = "FLEETUNE_JOIN"


def join(
    line: Annotated[
        str | None,
        typer.Argument(
            envvar=VARIABLE,
            show_envvar=True,
            show_default=False,
            help="the invitation, fleetune://HOST:PORT/FLEET/CODE/FINGERPRINT; - reads it from stdin;"
            " without it, the command asks for it on a terminal",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="the id that this device wants; default: the one that it has, or the coordinator's choice"
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="name of this device for people; default: the host name")
    ] = None,
    state: StateFolder = STATE,
) -> None:
    """Join a fleet with an invitation. After that, run needs neither --fleet, --broker nor --device."""
    os.environ.pop(VARIABLE, None)  # child processes do not need it

    from fleetune.edge_agent.joining.join import join as join_fleet
    from fleetune.edge_agent.state.defaults import HOST
    from fleetune.edge_agent.state.state_folder import only_device
    from fleetune.protocols.errors import SettingError
    from fleetune.protocols.wire.identity import check_display_name
    from fleetune.protocols.wire.join_exchange import MAX_JOIN_BYTES, JoinLine
    from fleetune.protocols.wire.topics import check_name

    with one_line_errors("edge-agent"):
        if line is None and sys.stdin.isatty():
            print("paste the line that edge-coordinator invite prints: ", end="", file=sys.stderr, flush=True)
            line = "-"
        if line is None:
            raise SettingError(
                "give the invitation, which edge-coordinator invite prints: edge-agent join LINE"
            )
        invitation = JoinLine.parse(sys.stdin.readline(MAX_JOIN_BYTES) if line == "-" else line)
        if device is not None:
            check_name(device, "device")
        wish = device or only_device(state, invitation.fleet)
        joined = join_fleet(invitation, state, device=wish, name=check_display_name(name or HOST), say=_say)
        until = joined.credentials.valid_until()
        print(
            f"joined fleet {joined.fleet} as device {joined.device}; its certificate is valid until"
            f" {until:%Y-%m-%d} and renews itself\nnext: edge-agent run --data npz:FILE{_state_option(state)}"
            "\nan agent that already runs needs no restart: it uses this at its next attempt to connect"
        )


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _state_option(state: Path) -> str:
    return "" if state == STATE else f" --state {state}"
