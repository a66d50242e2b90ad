"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

RunFile = Annotated[Path, typer.Argument(help="TOML file with the run's settings, see examples/")]
RunFolder = Annotated[Path, typer.Argument(help="folder of a run, e.g. runs/demo")]
Changes = Annotated[
    list[str],
    typer.Option("--set", help="section.key=value, replaces that setting of RUN_FILE; may be repeated"),
]
RunOrName = Annotated[str, typer.Argument(help="folder of a run, or the name of a service's run")]
ServiceFolder = Annotated[
    Path, typer.Option("--service", help="folder of the service that has the run of this name")
]
BrokerUrl = Annotated[
    str | None,
    typer.Option(
        envvar="FLEETUNE_BROKER",
        help="host:port or mqtt://user:password@host:port (mqtts:// for TLS); default: an embedded broker",
    ),
]
BrokerBind = Annotated[
    str,
    typer.Option(
        help="address of the embedded broker; 0.0.0.0 or :: opens it to the network, with TLS",
        callback=lambda bind: bind.removeprefix("[").removesuffix("]"),  # typed as in a URL
    ),
]
BrokerPort = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        help="port of the embedded broker, 0 for a free one; default: 1883 on the loopback; else 8883, and"
        " the next two for devices with a secret and for joining",
    ),
]
BrokerAuthority = Annotated[
    str | None, typer.Option(help="PEM file of the authority that signed the broker's certificate (TLS)")
]
BrokerCertificate = Annotated[
    str | None, typer.Option(help="PEM file of the coordinator's certificate (TLS)")
]
BrokerKey = Annotated[str | None, typer.Option(help="PEM file of the key of that certificate (TLS)")]
RunsFolder = Annotated[Path, typer.Option("--runs", help="folder of the runs")]


def sources(context: typer.Context) -> dict[str, str]:
    """Return the source of each option's value: "COMMANDLINE", "ENVIRONMENT" or "DEFAULT"."""
    found = {name: context.get_parameter_source(name) for name in context.params}
    return {name: "DEFAULT" if source is None else source.name for name, source in found.items()}
