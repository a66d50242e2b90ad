"""The options of `edge-agent run`. `doctor` takes them too, so that only the command's name changes."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from fleetune.edge_agent.state.defaults import STATE, TEST_FRACTION
from fleetune.protocols.settings.section import PROCESSOR

DeviceId = Annotated[
    str | None,
    typer.Option(
        "--device",
        envvar="FLEETUNE_DEVICE",
        help="this device's id, which never changes; default: as stored at joining or at the first start,"
        " which takes it from --name, else from the host name",
    ),
]
Fleet = Annotated[
    str | None,
    typer.Option(
        envvar="FLEETUNE_FLEET", help="name of the fleet; default: the one that this device has joined"
    ),
]
StateFolder = Annotated[Path, typer.Option("--state", help="folder of the personal models")]
Trainer = Annotated[
    str,
    typer.Option(help="auto (the lightest installed trainer that fits the run), onnx, torch or ort-training"),
]
TrainOn = Annotated[
    str, typer.Option(help="device that computes: cpu, cuda or cuda:1, tensorrt (onnx), mps (torch)")
]
Threads = Annotated[int, typer.Option(min=1, help="processor threads of training")]
Authority = Annotated[
    str | None, typer.Option(help="PEM file of the authority that signed the broker's certificate (TLS)")
]
Certificate = Annotated[str | None, typer.Option(help="PEM file of this device's certificate (TLS)")]
CertificateKey = Annotated[str | None, typer.Option(help="PEM file of the certificate's key (TLS)")]
Root = Annotated[Path, typer.Option(envvar="FLEETUNE_ROOT", help="folder with this board's proc and sys")]

LabelColumns = Annotated[
    str,
    typer.Option(help="label column of a table; several (a,b) are numbers"),
]


@dataclass(frozen=True)
class RunOptions:
    """The options of `edge-agent run` with their help texts, as typer reads them."""

    data: Annotated[
        str,
        typer.Option(
            help="npz:FILE with arrays x and y (optionally test, or x_train, y_train, x_test, y_test),"
            " digits, {idx,cifar,har,audio}:FOLDER, csv:FILE, csv:FOLDER or package.module:function; see"
            " docs/data.md, and edge-agent try."
            " Streams: watch:FOLDER, a generator function, mqtt://HOST:PORT/TOPIC at your sensors'"
            " own broker, or intake: for samples that other programs add; see docs/streams.md"
        ),
    ]
    fleet: Annotated[
        str | None,
        typer.Option(
            envvar="FLEETUNE_FLEET",
            help="name of the fleet; needed with --broker, and if this device has joined several fleets"
            " (edge-agent join)",
        ),
    ] = None
    broker: Annotated[
        str | None,
        typer.Option(
            envvar="FLEETUNE_BROKER",
            help="a broker of your own: host:port or mqtt://user:password@host:port (mqtts:// for TLS); not"
            " needed after edge-agent join",
        ),
    ] = None
    device: DeviceId = None
    name: Annotated[
        str | None,
        typer.Option(
            help="name of this device for people, which may change; default: as stored, or its id. Without"
            " --device, the first start takes the id from it"
        ),
    ] = None
    state: StateFolder = STATE
    board: Annotated[
        str, typer.Option(help="profile of this board: a name (see edge-agent boards) or a TOML file")
    ] = "auto"
    policy: Annotated[
        Path | None, typer.Option(help="TOML file with your policy; the options below take precedence")
    ] = None
    ratio: Annotated[
        float | None, typer.Option(help="largest share of the model to train and send, 0..1")
    ] = None
    charging_only: Annotated[
        bool | None, typer.Option("--charging-only", help="train only while charging, or without a battery")
    ] = None
    unmetered_only: Annotated[
        bool | None, typer.Option("--unmetered-only", help="train only on networks where traffic is free")
    ] = None
    max_celsius: Annotated[
        float | None, typer.Option(help="limit for the board's hottest zone, degrees Celsius")
    ] = None
    min_battery: Annotated[float | None, typer.Option(help="least charge on battery power, percent")] = None
    max_battery_percent_per_hour: Annotated[
        float | None, typer.Option(help="charge that training may use on battery power")
    ] = None
    max_memory_mb: Annotated[float | None, typer.Option(help="memory limit of the agent's process")] = None
    nice: Annotated[int | None, typer.Option(help="niceness added to the process, 0..19")] = None
    test_fraction: Annotated[
        float, typer.Option(min=0.01, max=0.99, help="share of the data that is held out for testing")
    ] = TEST_FRACTION
    keep_mb: Annotated[
        float | None, typer.Option(help="with a stream: megabytes of stored samples (200)")
    ] = None
    keep_days: Annotated[float | None, typer.Option(help="with a stream: remove older samples")] = None
    keep: Annotated[
        str | None,
        typer.Option(help="reservoir: a fair draw of all samples so far; newest: the last ones"),
    ] = None
    keep_balanced: Annotated[
        bool | None,
        typer.Option("--keep-balanced", help="when full, evict samples of the most frequent class first"),
    ] = None
    keep_unlabelled: Annotated[
        float | None, typer.Option(help="share of the space for samples without a label (0.5)")
    ] = None
    label_column: LabelColumns = "label"
    trainer: Trainer = "auto"
    train_on: TrainOn = PROCESSOR
    threads: Threads = 1
    trust: Annotated[
        list[str], typer.Option(help="package.module of your own that a run may name; may be repeated")
    ] = field(default_factory=list)
    ca: Authority = None
    cert: Certificate = None
    key: CertificateKey = None
    root: Root = Path("/")
    publish: Annotated[
        Path | None,
        typer.Option(help="ONNX file for your app, .onnx, replaced whenever another model is deployed"),
    ] = None
    publish_mode: Annotated[
        str | None, typer.Option(help="permissions of that file, such as 0640; default: those of the umask")
    ] = None
    leave_after_run: Annotated[bool, typer.Option(help="exit when a run is finished")] = False


def takes_run_options(but: tuple[str, ...] = (), *, required: bool = True) -> Callable[..., Any]:
    """Decorate `command(options, **own)` so that it takes every option of `run` except `but`.

    The options arrive as a mapping by name, the command's own parameters unchanged.

    Args:
        but: names of options to leave out.
        required: True requires options without a default. False sets them to None.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        asked = [_parameter(one, required=required) for one in fields(RunOptions) if one.name not in but]
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

        def call(**given: Any) -> None:
            mine = {one.name: given.pop(one.name) for one in own}
            command(given, **mine)

        call.__name__, call.__doc__ = command.__name__, command.__doc__
        parameters = [*asked, *(one.replace(kind=one.KEYWORD_ONLY) for one in own)]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return call

    return decorate


def _parameter(one: Field[Any], *, required: bool) -> inspect.Parameter:
    default = one.default_factory() if one.default_factory is not MISSING else one.default
    if default is MISSING:
        default = inspect.Parameter.empty if required else None
    return inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=one.type)
