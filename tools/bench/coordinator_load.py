"""The load on a coordinator as its fleet grows: a real coordinator, a real broker, and light devices.

The first round is left out, because the devices join in it. A light device (`tools.bench.light_devices`)
returns the weights of its task at once. So a round takes as long as coordinator, broker and the devices'
protocol need together on this machine. Processor time and bytes written are the coordinator's alone.
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

import msgspec
import psutil
import rich
from msgspec import Struct
from rich.table import Table

from fleetune.coordinator.broker.embedded_broker import EmbeddedBroker, Which
from fleetune.protocols.errors import SettingError, TransportError
from fleetune.protocols.files import write_atomically

FLEET = "bench"
PROCESSES = 2  # number of processes that run light devices
SPARE_FILES = 200  # open files of a process in addition to its connections

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


class Sample(Struct, frozen=True):
    """Counters at the end of a round.

    Attributes:
        time_s: monotonic clock.
        cpu_s: processor time of the coordinator.
        disk_bytes: bytes that the coordinator wrote to disk.
        all_cpu_s: processor time of coordinator, broker and devices.
    """

    time_s: float
    cpu_s: float
    disk_bytes: int
    all_cpu_s: float


class FleetReport(Struct, frozen=True):
    """Mean cost of the rounds after the first.

    Attributes:
        devices: connected devices.
        participants: devices that train in a round.
        updates_per_s: updates that the coordinator received.
        cpu_ms: processor time of the coordinator for each update.
        all_cpu_ms: processor time of coordinator, broker and devices for each update. With n cores of their
            own they could carry 1000 n / all_cpu_ms updates a second.
        written_bytes: bytes for each update that the coordinator handed to the file system.
        round_s: time from the end of a round to the end of the next.
    """

    devices: int
    participants: int
    updates_per_s: float
    cpu_ms: float
    all_cpu_ms: float
    written_bytes: float
    round_s: float


def measure(devices: int, participants: int | None, rounds: int, which: Which) -> FleetReport:
    """Run one fleet on this machine and return the cost of its rounds.

    Args:
        devices: number of devices that connect.
        participants: devices that train in a round; None for all.
        rounds: number of rounds, at least 2.
        which: the kind of broker.

    Raises:
        SettingError: the limit of open files is too low.
        TransportError: the coordinator or the devices failed.
    """
    _allow_files(devices + SPARE_FILES)
    line = "" if participants is None else f"participants = {participants}"
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        toml = RUN_TOML.format(rounds=rounds, devices=devices, participants=line)
        (folder / "run.toml").write_text(toml, encoding="utf-8")
        broker = stack.enter_context(EmbeddedBroker.start(folder / "broker", which=which))
        coordinator = stack.enter_context(_coordinator(folder, broker.port))
        others = [psutil.Process(broker.pid)]
        for number in range(PROCESSES):
            first, last = devices * number // PROCESSES, devices * (number + 1) // PROCESSES
            process = stack.enter_context(_light_devices(broker.port, first, last - first, folder))
            others.append(psutil.Process(process.pid))
        samples = _samples(coordinator, others, rounds, folder)
    return _report(devices, min(participants or devices, devices), samples)


def exponent(reports: list[FleetReport]) -> float | None:
    """Power with which the time of a round grows with the devices: a line fitted to the logarithms."""
    if len({report.devices for report in reports}) < 2:
        return None
    points = [(math.log(report.devices), math.log(report.round_s)) for report in reports]
    mean_x, mean_y = (sum(point[axis] for point in points) / len(points) for axis in (0, 1))
    rise = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return rise / sum((x - mean_x) ** 2 for x, _ in points)


def _allow_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        raise SettingError(f"{count} open files are needed, but {hard} are allowed: raise `ulimit -Hn`")
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


@contextmanager
def _started(command: list[str], log: Path, stdout: int | None = None) -> Iterator["subprocess.Popen[bytes]"]:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], env=environment, stdout=stdout, stderr=errors
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
        process.stdout.readline()  # the coordinator has started, so no device waits for it
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
    """Counters at the end of each round."""
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


def _report(devices: int, participants: int, samples: list[Sample]) -> FleetReport:
    first, last, rounds = samples[0], samples[-1], len(samples) - 1
    updates, seconds = participants * rounds, last.time_s - first.time_s
    return FleetReport(
        devices=devices,
        participants=participants,
        updates_per_s=updates / seconds,
        cpu_ms=1e3 * (last.cpu_s - first.cpu_s) / updates,
        all_cpu_ms=1e3 * (last.all_cpu_s - first.all_cpu_s) / updates,
        written_bytes=(last.disk_bytes - first.disk_bytes) / updates,
        round_s=seconds / rounds,
    )


def _table(reports: list[FleetReport]) -> Table:
    table = Table(box=None, header_style="dim")
    columns = (
        "devices",
        "participants",
        "updates/s",
        "CPU ms/update",
        "of all",
        "kB written/update",
        "round s",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for one in reports:
        table.add_row(
            str(one.devices),
            str(one.participants),
            f"{one.updates_per_s:.0f}",
            f"{one.cpu_ms:.2f}",
            f"{one.all_cpu_ms:.2f}",
            f"{one.written_bytes / 1e3:.0f}",
            f"{one.round_s:.3f}",
        )
    return table


def show_loads(
    sizes: list[int], participants: int | None, rounds: int, which: Which, out: Path | None
) -> None:
    """Measure fleets of these sizes and print a table; write the figures to `out` as JSON."""
    reports = []
    for size in sizes:
        reports.append(measure(size, participants, rounds, which))
        rich.print(_table(reports[-1:]))
    grows = exponent(reports)
    rich.print(_table(reports))
    if grows is not None:
        print(f"the time of a round grows with the number of devices to the power {grows:.2f}")
    if out is not None:
        content = {"fleets": reports, "exponent": grows}
        write_atomically(out, msgspec.json.format(msgspec.json.encode(content)), mode=None)
