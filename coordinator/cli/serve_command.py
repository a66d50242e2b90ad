"""edge-coordinator serve."""

import os
import signal
from contextlib import closing
from functools import partial
from pathlib import Path
from threading import Event
from typing import Annotated, Any

import typer

from fleetune.coordinator.cli.options import (
    BrokerAuthority,
    BrokerBind,
    BrokerCertificate,
    BrokerKey,
    BrokerPort,
    BrokerUrl,
    Changes,
    RunFile,
    RunsFolder,
    sources,
)
from fleetune.protocols.freed_memory import return_large_blocks
from fleetune.protocols.one_line import one_line_errors
from fleetune.protocols.settings.run_toml import read_run
from fleetune.protocols.wire import topics


def serve(
    context: typer.Context,
    run_file: RunFile,
    runs: RunsFolder = Path("runs"),
    broker: BrokerUrl = None,
    bind: BrokerBind = "127.0.0.1",
    port: BrokerPort = None,
    ca: BrokerAuthority = None,
    cert: BrokerCertificate = None,
    key: BrokerKey = None,
    fleet: Annotated[str | None, typer.Option(help="name of the fleet; default: the run's name")] = None,
    fresh: Annotated[bool, typer.Option(help="replace the files of an earlier run of this name")] = False,
    tracker: Annotated[
        list[str],
        typer.Option(
            help="tracker that follows the run: tensorboard, mlflow or module:function; may be repeated"
        ),
    ] = [],  # noqa: B006 - typer's way of saying it
    changes: Changes = [],  # noqa: B006
) -> None:
    """Run a fleet: wait for its devices, train RUN_FILE's rounds with them, report.

    It can be stopped at any moment. The same command then continues the run.
    """
    from fleetune.coordinator.broker.broker_options import broker_at, check_broker, default_port, origin_of
    from fleetune.coordinator.commands.commands import check_free, withdraw_stop
    from fleetune.coordinator.forgetting.while_served import serve_forgetting
    from fleetune.coordinator.serving.control_watch import SUPERVISED
    from fleetune.coordinator.serving.coordinator_conflict import ConflictDetector
    from fleetune.coordinator.trackers.follow import Following
    from fleetune.coordinator.trackers.tracker import makers_of

    return_large_blocks()
    with one_line_errors("edge-coordinator"):
        origin = origin_of(sources(context), supervised=SUPERVISED in os.environ)
        settings = read_run(run_file, changes)
        fleet = topics.check_name(fleet or settings.run.fleet or settings.run.name, "fleet")
        folder = runs / settings.run.name
        check_free(folder)
        makers = makers_of(tracker)
        port = default_port(bind) if port is None else port
        given = check_broker(broker, bind=bind, port=port, ca=ca, cert=cert, key=key)
        with closing(ConflictDetector(fleet, settings.run.name)) as detector:
            if given is not None:
                detector.ask(partial(_detector_transport, given, detector))
            from fleetune.coordinator.run.child_process import find_model_in_child

            # this import takes a while, during which the answer arrives
            from fleetune.coordinator.run.open_or_resume import open_run

            detector.wait()
            run = open_run(settings, folder, fresh=fresh, find=find_model_in_child)
            if SUPERVISED not in os.environ:  # a service has looked at the control file itself
                withdraw_stop(folder)
            with (
                closing(run.store),
                broker_at(given, folder, fleet, bind=bind, port=port, origin=origin) as (where, devices),
                closing(detector),  # closed before the broker that it is connected to
            ):
                if given is None:
                    detector.take(partial(_detector_transport, where, detector))
                serve_one = partial(_serve, broker=where, fleet=fleet, detector=detector, devices=devices)
                serve_forgetting(run, serve_one, partial(Following, makers, folder, folder.name), devices)


def _detector_transport(broker: Any, detector: Any, events: Any) -> Any:
    from fleetune.protocols.wire.transport.mqtt import MqttTransport

    subscriptions = [topics.coordinators(detector.fleet)]
    return MqttTransport(broker, detector.client_id, subscriptions=subscriptions, events=events)


def _serve(
    run: Any,
    following: Any,
    not_now: frozenset[str],
    *,
    broker: Any,
    fleet: str,
    detector: Any,
    devices: Any,
) -> bool:
    """Serve the run; return True if it was stopped only to forget a device."""
    from rich.console import Console

    from fleetune.coordinator.run.run_clock import RunClock
    from fleetune.coordinator.run.stored_run import note_fleet
    from fleetune.coordinator.serving.console_output import finish, print_start
    from fleetune.coordinator.serving.event_queue import Stop
    from fleetune.coordinator.serving.run_observers import observers_of
    from fleetune.coordinator.serving.server import Server
    from fleetune.protocols.wire.transport import EventSink
    from fleetune.protocols.wire.transport.mqtt import MqttTransport

    def make_transport(events: EventSink) -> MqttTransport:
        subscriptions = topics.coordinator_subscriptions(fleet)
        return MqttTransport(broker, topics.coordinator_id(fleet), subscriptions=subscriptions, events=events)

    note_fleet(run.store, fleet)
    console = Console()
    observers, clock = observers_of(run, console, following), RunClock.of(run.store)
    server = Server(
        run,
        fleet,
        make_transport,
        observers=observers,
        clock=clock,
        ahead_s=lambda: clock.ahead_s,
        devices=devices,
        not_now=not_now,
    )
    devices.report_to(server.events.put)
    asked_to_stop = Event()

    def stop(*_: Any) -> None:
        asked_to_stop.set()
        server.events.put(Stop())

    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, stop)
    print_start(run, fleet, console)  # a reader of this line may send a signal from now on
    detector.on_rival(stop)
    reason = server.serve()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, signal.default_int_handler)  # no loop reads the server's events any more
    if server.reopens and not asked_to_stop.is_set():
        return True
    finish(run, reason, console, following)
    if reason is None:
        detector.check()
    return False
