"""edge-coordinator broker-config: settings for a broker of your own."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from fleetune.protocols.one_line import one_line_errors


def broker_config(
    fleet: Annotated[list[str], typer.Option(help="name of a fleet; may be repeated")],
    kind: Annotated[
        Literal["mosquitto", "emqx"],
        typer.Option("--for", help="the broker's program; the files for EMQX 5 have not been tried"),
    ] = "mosquitto",
    out: Annotated[
        Path | None, typer.Option(help="folder to write both files to; default: print them")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="port of the listener; default: 8883 with TLS, 1883 without"),
    ] = None,
    cert: Annotated[Path | None, typer.Option(help="PEM file of the broker's certificate (TLS)")] = None,
    key: Annotated[Path | None, typer.Option(help="PEM file of the certificate's key (TLS)")] = None,
    ca: Annotated[
        Path | None,
        typer.Option(
            help="PEM file of the authority that signs the devices' certificates, which replace passwords"
        ),
    ] = None,
) -> None:
    """Write settings and access rules for your own broker: one user for each device."""
    from fleetune.coordinator.broker.own_broker import OwnBroker
    from fleetune.coordinator.broker.own_emqx import OwnEmqx

    with one_line_errors("edge-coordinator"):
        own = {"mosquitto": OwnBroker, "emqx": OwnEmqx}[kind](fleet, port, cert, key, ca)
        if out is not None:
            own.write(out)
            print(f"written: {out / own.configuration_file}, {out / own.rules_file}\n{own.next_steps(out)}")
            return
        print(f"### {own.home / own.read_from}\n{own.configuration(own.home)}")
        print(f"### {own.home / own.rules_file}\n{own.rules()}")
        print("\n".join(f"# {line}" for line in own.next_steps(own.home).splitlines()))
