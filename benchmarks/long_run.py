"""Growth of memory, files and disk of a fleet in a long open run with arriving data.

    python -m benchmarks.long_run FOLDER --rounds 10000

It runs a real broker, a coordinator with `rounds = "open"` and [adoption], and an agent with ONNX Runtime
that publishes its model. Rounds are short and follow each other directly. A simulated sensor sends noisy
handwritten digits to the agent. A tenth of them get their label later, and one in fifty is invalid. The
benchmark reads memory, open files, threads and folder size of each process at intervals. A line through the
second half of the readings predicts the growth in as many rounds again.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion

from fleetune.coordinator.broker.embedded_broker import EmbeddedBroker
from fleetune.coordinator.run.round_journal import ROUNDS
from fleetune.edge_agent.datasets.sources import load
from fleetune.protocols.errors import SettingError

RUN_TOML = """
[run]
name = "left-on"
rounds = "open"
[model]
name = "mlp"
input_shape = [1, 8, 8]
num_classes = 10
[method]
name = "fedavg"
[training]
epochs = 1
batch_size = 32
learning_rate = 0.05
[round]
deadline_s = 60
[adoption]
enabled = true
"""
FLEET, DEVICE, TOPIC = "left-on", "digits", "plant/digits"
KEEP_MB = 1  # some hundred digits; full within minutes
LABEL_LATER, BAD = 10, 50  # one sample in this many is invalid
GROWN = 0.02  # relative to the size; a larger rise counts as growth
LEAST_MB = 1.0  # a smaller rise never counts


@dataclass(frozen=True)
class Reading:
    """Size of one process and its folder at one time.

    Attributes:
        round: latest closed round.
        at_s: seconds since the start.
        part: `coordinator`, `agent` or `broker`.
        resident_mb: resident memory.
        files: open files and sockets.
        threads: threads of the process.
        folder_mb: size of its folder without downsampled rounds.
        folder_files: number of files in the folder.
        past_mb: size of the downsampled rounds, at most twice
            `coordinator.extensions.downsampling.MOST_BYTES`.
    """

    round: int
    at_s: float
    part: str
    resident_mb: float
    files: int
    threads: int
    folder_mb: float
    folder_files: int
    past_mb: float


class Sensor(threading.Thread):
    """A thread that publishes samples at a broker until it is stopped.

    Attributes:
        sent: number of samples so far.
    """

    def __init__(self, port: int, a_second: float) -> None:
        super().__init__(daemon=True)
        self._port, self._pause_s, self._stopped = port, 1 / a_second, threading.Event()
        self.sent = 0

    def run(self) -> None:
        client = Client(CallbackAPIVersion.VERSION2)
        client.connect("127.0.0.1", self._port)
        client.loop_start()
        self._feed(client)
        client.loop_stop()

    def stop(self) -> None:
        self._stopped.set()

    def _feed(self, client: Client) -> None:
        digits, draws = load("digits", None), np.random.default_rng(self.sent)
        while not self._stopped.wait(self._pause_s):
            row = int(draws.integers(len(digits.y)))
            x = (digits.x[row].reshape(1, 8, 8) + draws.normal(scale=0.05, size=(1, 8, 8))).round(4)
            for message in self._messages(x.tolist(), int(digits.y[row])):
                client.publish(TOPIC, json.dumps(message), qos=1)
            self.sent += 1

    def _messages(self, x: list[object], y: int) -> Iterator[dict[str, object]]:
        """Messages of the next sample."""
        name = f"s{self.sent}"
        if self.sent % BAD == BAD - 1:
            yield {"x": [0.0, 1.0], "y": y}
        elif self.sent % LABEL_LATER:
            yield {"x": x, "y": y, "id": name}
        else:
            yield {"x": x, "id": name}
            yield {"id": name, "y": y}


def read_part(part: str, pid: int, folder: Path, closed: int, at_s: float) -> Reading:
    """Measure a process and its folder. Raises OSError: the process has ended."""
    words = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    sizes, past = [], 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # deleted meanwhile
            if path.name.startswith("rounds-past"):
                past += path.stat().st_size
            elif path.is_file():
                sizes.append(path.stat().st_size)
    return Reading(
        round=closed,
        at_s=round(at_s, 1),
        part=part,
        resident_mb=int(words["VmRSS"].split()[0]) * 1024 / 1e6,
        files=sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()),
        threads=int(words["Threads"]),
        folder_mb=sum(sizes) / 1e6,
        folder_files=len(sizes),
        past_mb=past / 1e6,
    )


def closed_rounds(journal: Path) -> int:
    """Number of the latest round in rounds.jsonl, or 0."""
    if not journal.exists():
        return 0
    with journal.open("rb") as file:
        file.seek(max(0, journal.stat().st_size - 65536))
        lines = [line for line in file.read().splitlines() if line.endswith(b"}")]
    with contextlib.suppress(ValueError, KeyError):
        return int(json.loads(lines[-1])["number"]) if lines else 0
    return 0


def growth(readings: list[Reading], key: str) -> tuple[float, float]:
    """Mean of a figure, and its predicted rise in as many rounds again.

    A line is fitted to the second half of the readings.
    """
    late = readings[len(readings) // 2 :]
    rounds = np.asarray([one.round for one in late], float)
    values = np.asarray([getattr(one, key) for one in late], float)
    slope = np.polyfit(rounds, values, 1)[0] if len(set(rounds)) > 1 else 0.0
    return float(values.mean()), float(slope * readings[-1].round)


def is_flat(key: str, level: float, rises: float) -> bool:
    """True if a figure is constant: within one for counts, within GROWN or LEAST_MB for megabytes."""
    return rises < (max(LEAST_MB, GROWN * level) if key.endswith("mb") else 1.0)


def start(command: list[str], log: Path, stack: ExitStack) -> "subprocess.Popen[bytes]":
    """Start a module of ours; the stack ends it."""
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-P", "-m", *command], stdout=output, stderr=output)
    stack.callback(process.wait, 60)
    stack.callback(process.terminate)
    return process


def run_fleet(folder: Path, rounds: int, readings: int, samples_a_second: float) -> list[Reading]:
    """Run the fleet for this many rounds and return the readings.

    Raises:
        SettingError: a process ended.
    """
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(RUN_TOML)
    with ExitStack() as stack:
        broker = EmbeddedBroker.start(folder / "broker", which="amqtt")
        stack.callback(broker.kill)
        where = ["--broker", f"127.0.0.1:{broker.port}"]
        serve = [
            "fleetune.coordinator.cli",
            "serve",
            str(folder / "run.toml"),
            "--runs",
            str(folder / "runs"),
        ]
        agent = ["fleetune.edge_agent.cli", "run", "--fleet", FLEET, "--device", DEVICE, "--trainer", "onnx"]
        agent += ["--data", f"mqtt://127.0.0.1:{broker.port}/{TOPIC}", "--state", str(folder / "state")]
        agent += ["--keep-mb", str(KEEP_MB), "--publish", str(folder / "state" / "model.onnx")]
        parts = {
            "coordinator": (start([*serve, *where], folder / "coordinator.log", stack), folder / "runs"),
            "agent": (start([*agent, *where], folder / "agent.log", stack), folder / "state"),
        }
        sensor = Sensor(broker.port, samples_a_second)
        sensor.start()
        stack.callback(sensor.stop)
        found = _watch(parts, broker.pid, folder, rounds, readings)
        print(f"{sensor.sent} samples were sent", flush=True)
    return found


def _watch(
    parts: dict[str, tuple["subprocess.Popen[bytes]", Path]],
    broker: int,
    folder: Path,
    rounds: int,
    readings: int,
) -> list[Reading]:
    """Read all processes at equal intervals of rounds."""
    journal = folder / "runs" / FLEET / ROUNDS
    found: list[Reading] = []
    began, next_at = time.monotonic(), 0
    while next_at <= rounds:
        for part, (process, _) in parts.items():
            if process.poll() is not None:
                raise SettingError(f"the {part} ended: {(folder / f'{part}.log').read_text()[-500:]}")
        closed, at_s = closed_rounds(journal), time.monotonic() - began
        if closed < max(1, next_at):
            time.sleep(0.2)
            continue
        pids = {part: (process.pid, place) for part, (process, place) in parts.items()}
        for part, (pid, place) in {**pids, "broker": (broker, folder / "broker")}.items():
            found.append(read_part(part, pid, place, closed, at_s))
            print(json.dumps(asdict(found[-1])), flush=True)
        next_at += rounds // readings
    return found


def report(found: list[Reading]) -> Iterator[str]:
    """Lines of a Markdown table: each figure at four times, its predicted growth, and a verdict."""
    keys = ("resident_mb", "files", "threads", "folder_mb", "folder_files")
    yield "| part | figure | first | at a tenth | at half | last | in as many rounds again | |"
    yield "|---|---|--:|--:|--:|--:|--:|---|"
    for part in dict.fromkeys(one.part for one in found):
        own = [one for one in found if one.part == part]
        places = [own[0], own[len(own) // 10], own[len(own) // 2], own[-1]]
        for key in keys:
            level, rises = growth(own, key)
            verdict = "flat" if is_flat(key, level, rises) else "grows"
            cells = [f"{getattr(one, key):.5g}" for one in places]
            yield f"| {part} | {key} | {' | '.join(cells)} | {rises:+.2g} | {verdict} |"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("folder", type=Path, help="a new folder for the fleet's files")
    options.add_argument("--rounds", type=int, default=10_000)
    options.add_argument("--readings", type=int, default=100)
    options.add_argument("--samples", type=float, default=20.0, help="sent in a second")
    given = options.parse_args()
    found = run_fleet(given.folder, given.rounds, min(given.readings, given.rounds), given.samples)
    print("\n".join(report(found)))


if __name__ == "__main__":
    main()
