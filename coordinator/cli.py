"""edge-coordinator: the program on the edge server."""

import logging
import os
import signal
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fleetune.protocols.command_group import Commands
from fleetune.protocols.one_line import one_line_errors
from fleetune.protocols.settings.run_toml import read_run
from fleetune.protocols.version import show_version
from fleetune.protocols.wire import topics

app = typer.Typer(
    cls=Commands,
    help="Run a fleet's training at the edge: plan rounds, exchange sparse updates over MQTT, aggregate.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

RunFile = Annotated[Path, typer.Argument(help="the run's settings, see examples/")]
RunFolder = Annotated[Path, typer.Argument(help="folder of a run, e.g. runs/demo")]
Changes = Annotated[list[str], typer.Option("--set", help="section.key=value on top of RUN_FILE; may repeat")]
OrderedRun = Annotated[str, typer.Argument(help="folder of a run, or the name of one of a service")]
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
        callback=lambda bind: bind.removeprefix("[").removesuffix("]"),  # as an IPv6 address stands in a URL
    ),
]
BrokerAuthority = Annotated[str | None, typer.Option(help="PEM file of the broker's authority (TLS)")]
BrokerCertificate = Annotated[str | None, typer.Option(help="PEM file of our certificate (TLS)")]
BrokerKey = Annotated[str | None, typer.Option(help="PEM file of our certificate's key (TLS)")]
RunsFolder = Annotated[Path, typer.Option("--runs", help="where runs are kept")]


@app.callback()
def main(
    verbose: Annotated[bool, typer.Option(help="log every message's fate")] = False,
    version: Annotated[  # noqa: ARG001 - acted upon by its callback
        bool, typer.Option("--version", help="print it and stop", is_eager=True, callback=show_version)
    ] = False,
) -> None:
    level = logging.DEBUG if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s")


@app.command()
def serve(
    context: typer.Context,
    run_file: RunFile,
    runs: RunsFolder = Path("runs"),
    broker: BrokerUrl = None,
    bind: BrokerBind = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="of the embedded broker; 0 takes a free one")
    ] = 1883,
    ca: BrokerAuthority = None,
    cert: BrokerCertificate = None,
    key: BrokerKey = None,
    fleet: Annotated[str | None, typer.Option(help="name of the fleet; the run's name if not given")] = None,
    fresh: Annotated[bool, typer.Option(help="replace what an earlier run of this name left")] = False,
    tracker: Annotated[
        list[str], typer.Option(help="tensorboard, mlflow or module:function follows; may repeat")
    ] = [],  # noqa: B006 - typer's way of saying it
    changes: Changes = [],  # noqa: B006
) -> None:
    """Run a fleet: wait for its devices, train RUN_FILE's rounds with them, report.

    Stopped at any moment, the same command goes on where it was.
    """
    from fleetune.coordinator.broker.broker_options import broker_at, check_broker, origin_of
    from fleetune.coordinator.commands.commands import withdraw_stop
    from fleetune.coordinator.serving.control_watch import SUPERVISED
    from fleetune.coordinator.serving.coordinator_conflict import ConflictDetector
    from fleetune.coordinator.store.folder_lock import check_unclaimed
    from fleetune.coordinator.trackers.follow import Following
    from fleetune.coordinator.trackers.tracker import makers_of

    with one_line_errors("edge-coordinator"):
        origin = origin_of(_sources(context), supervised=SUPERVISED in os.environ)
        settings = read_run(run_file, changes)
        fleet = topics.check_name(fleet or settings.run.fleet or settings.run.name, "fleet")
        folder = runs / settings.run.name
        check_unclaimed(folder)
        makers = makers_of(tracker)
        given = check_broker(broker, bind=bind, port=port, ca=ca, cert=cert, key=key)
        with closing(ConflictDetector(fleet, settings.run.name)) as detector:
            if given is not None:
                detector.ask(partial(_detector_transport, given, detector))
            from fleetune.coordinator.run.child_process import find_model_in_child
            from fleetune.coordinator.run.open_or_resume import open_run  # takes its time, and the answer too

            detector.wait()
            run = open_run(settings, folder, fresh=fresh, find=find_model_in_child)
            if SUPERVISED not in os.environ:  # a service has looked at the control file itself
                withdraw_stop(folder)
            with (
                closing(run.store),
                broker_at(given, folder, fleet, bind=bind, port=port, origin=origin) as where,
                closing(detector),  # before its broker
            ):
                if given is None:
                    detector.take(partial(_detector_transport, where, detector))
                with Following(makers, folder, folder.name) as following:
                    _serve(run, where, fleet, detector, following)


def _sources(context: typer.Context) -> dict[str, str]:
    """Of each option of a command: "COMMANDLINE", "ENVIRONMENT" or "DEFAULT"."""
    found = {name: context.get_parameter_source(name) for name in context.params}
    return {name: "DEFAULT" if source is None else source.name for name, source in found.items()}


def _detector_transport(broker: Any, detector: Any, events: Any) -> Any:
    from fleetune.protocols.wire.transport.mqtt import MqttTransport

    subscriptions = [topics.coordinators(detector.fleet)]
    return MqttTransport(broker, detector.client_id, subscriptions=subscriptions, events=events)


def _serve(run: Any, broker: Any, fleet: str, detector: Any, following: Any) -> None:
    from rich.console import Console

    from fleetune.coordinator.run.run_clock import RunClock
    from fleetune.coordinator.serving.console_output import finish, print_start
    from fleetune.coordinator.serving.event_queue import Stop
    from fleetune.coordinator.serving.run_observers import observers_of
    from fleetune.coordinator.serving.server import Server
    from fleetune.protocols.wire.transport import EventSink
    from fleetune.protocols.wire.transport.mqtt import MqttTransport

    def make_transport(events: EventSink) -> MqttTransport:
        subscriptions = topics.coordinator_subscriptions(fleet)
        return MqttTransport(broker, f"coordinator-{fleet}", subscriptions=subscriptions, events=events)

    console = Console()
    observers, clock = observers_of(run, console, following), RunClock.of(run.store)
    server = Server(
        run, fleet, make_transport, observers=observers, clock=clock, ahead_s=lambda: clock.ahead_s
    )
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, lambda *_: server.events.put(Stop()))
    print_start(run, fleet, str(broker), console)  # whoever reads it may stop us from then on
    detector.on_rival(lambda: server.events.put(Stop()))
    reason = server.serve()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, signal.default_int_handler)  # nobody reads the server's events any more
    finish(run, reason, console, following)
    if reason is None:
        detector.check()


@app.command()
def pause(run: OrderedRun, service_folder: ServiceFolder = Path()) -> None:
    """Let a run open no new round until `resume`; the one that is open is finished."""
    _apply("Pause", run, service_folder)


@app.command()
def resume(run: OrderedRun, service_folder: ServiceFolder = Path()) -> None:
    """Let a paused run go on."""
    _apply("Resume", run, service_folder)


@app.command()
def stop(run: OrderedRun, service_folder: ServiceFolder = Path()) -> None:
    """Leave a run as Ctrl-C does, from another terminal; it goes on when it is served again, or `start`ed."""
    _apply("Stop", run, service_folder)


@app.command()
def start(run: OrderedRun, service_folder: ServiceFolder = Path()) -> None:
    """Let a service start a stopped run again."""
    _apply("Start", run, service_folder)


def _apply(name: Literal["Pause", "Resume", "Stop", "Start"], run: str, service_folder: Path) -> None:
    from fleetune.coordinator.commands import commands
    from fleetune.coordinator.service.service import folder_of

    command: commands.Command = getattr(commands, name)()
    with one_line_errors("edge-coordinator"):
        print(commands.apply(command, folder_of(run, service_folder)))


@app.command()
def service(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="folder of run.toml files")],
    broker: BrokerUrl = None,
    bind: BrokerBind = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="of the first fleet's embedded broker; 0 takes free ones")
    ] = 1883,
    ca: BrokerAuthority = None,
    cert: BrokerCertificate = None,
    key: BrokerKey = None,
) -> None:
    """Serve all runs of FOLDER, each in a process of its own that is looked after; files may come and go."""
    from fleetune.coordinator.broker.broker_options import origin_of
    from fleetune.coordinator.service.start import serve_folder

    logging.getLogger("fleetune.coordinator.service").setLevel(logging.INFO)
    with one_line_errors("edge-coordinator"):
        origin, tls = origin_of(_sources(context)), {"ca": ca, "cert": cert, "key": key}
        serve_folder(folder, broker=broker, bind=bind, port=port, tls=tls, origin=origin)


@app.command()
def report(folder: RunFolder) -> None:
    """Write a run's report anew, also of one that was stopped or is going on, and show its tables."""
    from fleetune.coordinator.run.stored_run import look_at
    from fleetune.coordinator.serving.console_output import report_run
    from fleetune.coordinator.store.folder_lock import is_claimed

    with one_line_errors("edge-coordinator"), look_at(folder) as run:
        report_run(run, live=is_claimed(folder))


@app.command()
def devices(
    folder: RunFolder,
    as_json: Annotated[bool, typer.Option("--json", help="for scripts")] = False,
) -> None:
    """List a run's devices: board, ratio and why, what a round takes, power and heat, last answer."""
    import msgspec

    from fleetune.coordinator.queries import queries
    from fleetune.coordinator.serving.console_output import print_devices

    with one_line_errors("edge-coordinator"):
        found = queries.devices(folder)
        if as_json:
            print(msgspec.json.encode(found).decode())
        else:
            print_devices(found)


@app.command()
def explain(folder: RunFolder) -> None:
    """Show a run's ratios with their costs, and why devices work at them."""
    from rich.console import Console

    from fleetune.coordinator.reports.proposals.explanation import explanation
    from fleetune.coordinator.run.stored_run import look_at

    with one_line_errors("edge-coordinator"), look_at(folder) as run:
        controller = run.controller
        Console().print(explanation(run.settings, controller.engine_state, controller.records()))


@app.command()
def status(
    folder: RunFolder,
    follow: Annotated[bool, typer.Option(help="go on showing it until the run ends; Ctrl-C leaves")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="of a run, for scripts")] = False,
) -> None:
    """Show how a run stands, also while it is going on: round, who replied, who is missing and why.

    Of the folder of a service, how all its runs stand.
    """
    import msgspec

    from fleetune.coordinator.queries import queries
    from fleetune.coordinator.reports import status as run_status
    from fleetune.coordinator.service.service import is_service

    with one_line_errors("edge-coordinator"):
        if as_json:
            print(msgspec.json.encode(queries.status(folder)).decode())
            return
        if is_service(folder) and not follow:
            from fleetune.coordinator.service.status_table import print_service_status

            print_service_status(folder)
            return
        if not follow:
            run_status.show_status(folder)
            return
        with suppress(KeyboardInterrupt):
            run_status.follow(folder)


@app.command()
def invite(
    folder: RunFolder,
    as_json: Annotated[bool, typer.Option("--json", help="for scripts")] = False,
) -> None:
    """Print the command by which a device joins a run's fleet, with the fleet's password if it has one."""
    import msgspec

    from fleetune.coordinator.broker.invitation import invitation_of

    with one_line_errors("edge-coordinator"):
        found, password = invitation_of(folder)
        if as_json:
            command = found.command(password)
            said = {"fleet": found.fleet, "broker": found.url(password), "command": command}
            print(msgspec.json.encode(said).decode())
        else:
            print(found.command(password))


@app.command()
def broker_config(
    fleet: Annotated[list[str], typer.Option(help="name of a fleet; may repeat")],
    out: Annotated[Path | None, typer.Option(help="folder to write both files to; else printed")] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="of the listener; else 8883 with TLS, 1883 without")
    ] = None,
    cert: Annotated[Path | None, typer.Option(help="PEM file of the broker's certificate (TLS)")] = None,
    key: Annotated[Path | None, typer.Option(help="PEM file of its key (TLS)")] = None,
    ca: Annotated[
        Path | None,
        typer.Option(help="PEM file of the authority of devices' certificates, in place of passwords"),
    ] = None,
) -> None:
    """Write settings and access rules for a mosquitto of your own: one user for each device."""
    from fleetune.coordinator.broker.own_broker import CONFIGURATION, DEBIAN, RULES, OwnBroker

    with one_line_errors("edge-coordinator"):
        own = OwnBroker(fleet, port, cert, key, ca)
        if out is not None:
            own.write(out)
            print(f"written: {out / CONFIGURATION}, {out / RULES}\n{own.next_steps(out)}")
            return
        print(f"### {DEBIAN / 'conf.d' / CONFIGURATION}\n{own.configuration(DEBIAN)}")
        print(f"### {DEBIAN / RULES}\n{own.rules()}")
        print("\n".join(f"# {line}" for line in own.next_steps(DEBIAN).splitlines()))


@app.command()
def weights(
    folder: RunFolder, out: Annotated[Path, typer.Argument(help="file to write, .safetensors")]
) -> None:
    """Write a run's shared model, as it stands, as safetensors."""
    from fleetune.coordinator.run.stored_run import look_at, save_shared_model

    with one_line_errors("edge-coordinator"), look_at(folder) as run:
        print(save_shared_model(run, out))


@app.command()
def export(
    model: Annotated[
        str, typer.Argument(help="a built-in model, package.module:function, or a run's settings (.toml)")
    ],
    input_shape: Annotated[
        str | None, typer.Option("--input", help="shape of one sample, e.g. 1x28x28")
    ] = None,
    classes: Annotated[int | None, typer.Option(min=2, help="number of classes")] = None,
    out: Annotated[Path | None, typer.Option(help="file to write; else MODEL.bundle here")] = None,
    onnx: Annotated[
        Path | None, typer.Option(help="folder for its graphs as ONNX files, to look at (e.g. in Netron)")
    ] = None,
    seed: Annotated[
        int, typer.Option(help="of first weights, where a coordinator without torch cannot draw them")
    ] = 0,
    changes: Changes = [],  # noqa: B006 - typer's way of saying it
) -> None:
    """Turn a model into a bundle: agents train it, and coordinators serve it, without torch.

    Every graph in it is compared with torch's own gradients before it is written.
    """
    import rich

    from fleetune.coordinator.bundle_file import bundle_summary, bundle_table, settings_for, write_bundle

    with one_line_errors("edge-coordinator"):
        settings = settings_for(model, input_shape, classes, seed, changes)
        written = write_bundle(settings, out, onnx)
        rich.print(bundle_table(written))
        print(bundle_summary(written))


if __name__ == "__main__":
    app()
