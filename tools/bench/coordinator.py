"""What a coordinator costs as its fleet grows: a real one, a real broker, light devices in a few processes.

    edge-sim bench fleet --devices 100,500,2000 --asked all --rounds 4
    edge-sim bench fleet --devices 10000 --asked 10 --rounds 6

The first round is left out: in it the devices join. A light device answers its task at once with the weights
it was sent (`tools.bench.light_devices`), so that the time of a round is what coordinator, broker and the
devices' protocol take of this machine together; processor time and bytes written are the coordinator's alone.
"""

import math
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import psutil
import rich
import typer
from msgspec import Struct
from rich.table import Table

from fleetune.coordinator.broker.embedded_broker import EmbeddedBroker, Which
from fleetune.protocols.errors import SettingError, TransportError
from fleetune.protocols.files import write_atomically
from fleetune.protocols.one_line import one_line_errors

FLEET = "bench"
PROCESSES = 2  # of light devices
SPARE_FILES = 200  # of a process, beside its connections

RUN_TOML = """
[run]
name = "bench"
rounds = {rounds}
final_evaluation = false
[model]
name = "mlp"
input_shape = [1, 8, 8]
num_classes = 10
[method]
name = "fedavg"
[round]
start_with = {devices}
deadline_s = 600
{participants}
"""

app = typer.Typer(help="Measure Fleetune itself on this machine.", no_args_is_help=True)


class Sample(Struct, frozen=True):
    """When a round was closed: clock; processor time and bytes to disk of the coordinator so far; processor
    time of coordinator, broker and devices together.
    """

    time_s: float
    cpu_s: float
    disk_bytes: int
    all_cpu_s: float


class FleetReport(Struct, frozen=True):
    """What the rounds after the first cost, on average.

    Attributes:
        devices, asked: connected, and asked a round.
        updates_per_s: that the coordinator took in.
        cpu_ms: of the coordinator's process, an update.
        all_cpu_ms: of coordinator, broker and devices, an update: on cores of their own n of them could carry
            1000 n / all_cpu_ms updates a second.
        written_bytes: an update, as the kernel counts what the process hands to the file system.
        round_s: from a round's closing to the next one's.
    """

    devices: int
    asked: int
    updates_per_s: float
    cpu_ms: float
    all_cpu_ms: float
    written_bytes: float
    round_s: float


def measure(devices: int, asked: int | None, rounds: int, which: Which) -> FleetReport:
    """One fleet on one machine.

    Args:
        devices: that connect.
        asked: a round; None: all.
        rounds: at least 2.
        which: broker.

    Raises:
        SettingError: this process may not open as many files.
        TransportError: the coordinator or the devices failed.
    """
    _allow_files(devices + SPARE_FILES)
    participants = "" if asked is None else f"participants = {asked}"
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        toml = RUN_TOML.format(rounds=rounds, devices=devices, participants=participants)
        (folder / "run.toml").write_text(toml, encoding="utf-8")
        broker = stack.enter_context(EmbeddedBroker.start(folder / "broker", which=which))
        coordinator = stack.enter_context(_coordinator(folder, broker.port))
        others = [psutil.Process(broker.pid)]
        for number in range(PROCESSES):
            first, last = devices * number // PROCESSES, devices * (number + 1) // PROCESSES
            process = stack.enter_context(_light_devices(broker.port, first, last - first, folder))
            others.append(psutil.Process(process.pid))
        samples = _samples(coordinator, others, rounds, folder)
    return _report(devices, min(asked or devices, devices), samples)


def exponent(reports: list[FleetReport]) -> float | None:
    """Of the time of a round in the number of devices: the slope of a line through the logarithms."""
    if len({report.devices for report in reports}) < 2:
        return None
    points = [(math.log(report.devices), math.log(report.round_s)) for report in reports]
    mean_x, mean_y = (sum(point[axis] for point in points) / len(points) for axis in (0, 1))
    rise = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return rise / sum((x - mean_x) ** 2 for x, _ in points)


def _allow_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        raise SettingError(f"{count} open files are needed, {hard} allowed: raise `ulimit -Hn`")
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


@contextmanager
def _started(command: list[str], log: Path, **options: int) -> Iterator["subprocess.Popen[bytes]"]:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], env=environment, stderr=errors, **options
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def _coordinator(folder: Path, port: int) -> Iterator["subprocess.Popen[bytes]"]:
    command = ["fleetune.coordinator.cli", "serve", str(folder / "run.toml"), "--runs", str(folder / "runs")]
    command += ["--broker", f"127.0.0.1:{port}", "--fleet", FLEET]
    with _started(command, folder / "coordinator.log", stdout=subprocess.PIPE) as process:
        assert process.stdout is not None, "it was asked for"
        process.stdout.readline()  # it has begun: no device waits for a coordinator
        yield process


@contextmanager
def _light_devices(port: int, first: int, count: int, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    command = ["fleetune.tools.bench.light_devices", "--port", str(port), "--fleet", FLEET]
    command += ["--first", str(first), "--count", str(count)]
    with _started(command, folder / "devices.log") as process:
        yield process


def _samples(
    coordinator: "subprocess.Popen[bytes]", others: list[psutil.Process], rounds: int, folder: Path
) -> list[Sample]:
    """Of the moments at which each round was closed."""
    process, samples = psutil.Process(coordinator.pid), list[Sample]()
    assert coordinator.stdout is not None, "it was asked for"
    for line in coordinator.stdout:
        if re.search(rb"round \d+/\d+ ", line):
            cpu_s, written = _cpu_s(process), process.io_counters()
            all_cpu_s = cpu_s + sum(map(_cpu_s, others))
            samples.append(Sample(time.monotonic(), cpu_s, written.write_bytes, all_cpu_s))
        if len(samples) == rounds:
            return samples
    logs = "".join((folder / name).read_text()[-500:] for name in ("coordinator.log", "devices.log"))
    raise TransportError(f"the coordinator stopped after {len(samples)} rounds: {' '.join(logs.split())}")


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _report(devices: int, asked: int, samples: list[Sample]) -> FleetReport:
    first, last, rounds = samples[0], samples[-1], len(samples) - 1
    updates, seconds = asked * rounds, last.time_s - first.time_s
    return FleetReport(
        devices=devices,
        asked=asked,
        updates_per_s=updates / seconds,
        cpu_ms=1e3 * (last.cpu_s - first.cpu_s) / updates,
        all_cpu_ms=1e3 * (last.all_cpu_s - first.all_cpu_s) / updates,
        written_bytes=(last.disk_bytes - first.disk_bytes) / updates,
        round_s=seconds / rounds,
    )


def _table(reports: list[FleetReport]) -> Table:
    table = Table(box=None, header_style="dim")
    columns = ("devices", "asked", "updates/s", "CPU ms/update", "of all", "kB written/update", "round s")
    for column in columns:
        table.add_column(column, justify="right")
    for one in reports:
        table.add_row(
            str(one.devices),
            str(one.asked),
            f"{one.updates_per_s:.0f}",
            f"{one.cpu_ms:.2f}",
            f"{one.all_cpu_ms:.2f}",
            f"{one.written_bytes / 1e3:.0f}",
            f"{one.round_s:.3f}",
        )
    return table


def _number(words: str, option: str) -> int:
    if not words.strip().isdigit() or not int(words):
        raise SettingError(f"{option} {words!r}: give a whole number above 0, e.g. 500")
    return int(words)


@app.callback()
def main() -> None:
    """Measure Fleetune itself on this machine."""


@app.command()
def fleet(
    devices: Annotated[
        str, typer.Option(help="how many connect; several sizes with commas")
    ] = "100,500,2000",
    asked: Annotated[str, typer.Option(help="how many of them a round asks, or all")] = "all",
    rounds: Annotated[int, typer.Option(min=2, help="the first is not counted")] = 4,
    broker: Annotated[str, typer.Option(help="auto, mosquitto or amqtt")] = "auto",
    out: Annotated[Path | None, typer.Option(help="file for the figures as JSON")] = None,
) -> None:
    """Measure what a coordinator costs as its fleet grows: a real one, with devices that do not train."""
    with one_line_errors("edge-sim"):
        sizes = [_number(size, "--devices") for size in devices.split(",")]
        limit = None if asked == "all" else _number(asked, "--asked")
        if broker not in ("auto", "mosquitto", "amqtt"):
            raise SettingError(f"--broker {broker!r}: auto, mosquitto or amqtt")
        reports = []
        for size in sizes:
            reports.append(measure(size, limit, rounds, broker))  # type: ignore[arg-type]
            rich.print(_table(reports[-1:]))
        grows = exponent(reports)
        rich.print(_table(reports))
        if grows is not None:
            print(f"a round grows with the {grows:.2f}th power of the fleet")
        if out is not None:
            content = {"fleets": reports, "exponent": grows}
            write_atomically(out, msgspec.json.format(msgspec.json.encode(content)), mode=None)
