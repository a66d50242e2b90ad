"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

RunFile = Annotated[Path, typer.Argument(help="the run's settings, see examples/")]
RunFolder = Annotated[Path, typer.Argument(help="folder of a run, e.g. runs/demo")]
Changes = Annotated[list[str], typer.Option("--set", help="section.key=value on top of RUN_FILE; may repeat")]
RunOrName = Annotated[str, typer.Argument(help="folder of a run, or the name of one of a service")]
ServiceFolder = Annotated[Path, typer.Option("--service", help="folder of the service, for a run's name")]
BrokerUrl = Annotated[
    str | None,
    typer.Option(
        envvar="FLEETUNE_BROKER",
        help="host:port or mqtt[s]://user:password@host:port; embedded if not given",
    ),
]
BrokerBind = Annotated[
    str,
    typer.Option(
        help="address of the embedded broker; 0.0.0.0 or :: for the network, with a password",
        callback=lambda bind: bind.removeprefix("[").removesuffix("]"),  # typed as in a URL
    ),
]
BrokerAuthority = Annotated[str | None, typer.Option(help="PEM file of the broker's authority (TLS)")]
BrokerCertificate = Annotated[str | None, typer.Option(help="PEM file of our certificate (TLS)")]
BrokerKey = Annotated[str | None, typer.Option(help="PEM file of our certificate's key (TLS)")]
RunsFolder = Annotated[Path, typer.Option("--runs", help="where runs are kept")]


def sources(context: typer.Context) -> dict[str, str]:
    """The source of each option's value: "COMMANDLINE", "ENVIRONMENT" or "DEFAULT"."""
    found = {name: context.get_parameter_source(name) for name in context.params}
    return {name: "DEFAULT" if source is None else source.name for name, source in found.items()}
