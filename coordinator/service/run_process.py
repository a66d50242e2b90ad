"""Starts the process of one run (`edge-coordinator serve`) and limits the size of its log file."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fleetune.coordinator.broker.broker_options import is_loopback
from fleetune.coordinator.broker.embedded_broker import claim_ports
from fleetune.coordinator.broker.fleet_listeners import NUM_PORTS
from fleetune.coordinator.service.run_files import RunFile
from fleetune.coordinator.serving.control_watch import SUPERVISED
from fleetune.coordinator.tied_child import tied
from fleetune.protocols.errors import SettingError, StoreError, TransportError
from fleetune.protocols.files import write_atomically

PORTS = "ports.json"
MOST_LOG_BYTES = 5 * 2**20
_LAST_BYTES = 4096
_HIGHEST_PORT = 65_535


@dataclass
class RunProcess:
    """A running `edge-coordinator serve` process.

    Attributes:
        log: the file that holds the process's output.
    """

    log: Path
    _process: "subprocess.Popen[bytes]"

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code of the process; None while it runs. Rotates a log that has grown too long."""
        code = self._process.poll()
        if code is None and self.log.stat().st_size > MOST_LOG_BYTES:
            shutil.copyfile(self.log, self.log.with_name(self.log.name + ".1"))
            # the process goes on at the new end, because it opened the file to append
            os.truncate(self.log, 0)
        return code

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def last_words(self) -> str:
        """Return the last line of the process's output; "" if there is none."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _LAST_BYTES))
            lines = file.read().decode("utf-8", "replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


@dataclass
class Launcher:
    """Starts the processes of one service's runs.

    Attributes:
        runs: the folder that holds the folders of runs.
        own: the folder of the service's own files, such as logs and ports.
        bind: the address of the embedded brokers, one for each fleet.
        port: the port of the first embedded broker; 0 for free ports.
        options: further options for `serve`.
        environment: further environment variables; if they name a broker, no embedded broker is started.
    """

    runs: Path
    own: Path
    bind: str = "127.0.0.1"
    port: int = 1883
    options: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)

    def __call__(self, file: RunFile) -> RunProcess:
        """Start the process of a run.

        Raises:
            SettingError: no port is free.
            StoreError, OSError: the disk is full.
        """
        command = [sys.executable, "-m", "fleetune.coordinator.cli", "serve", str(file.path.absolute())]
        command += ["--runs", str(self.runs.absolute()), *self._where(file)]
        log = self.own / f"{file.name}.log"
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            process = subprocess.Popen(  # noqa: S603 - our own command line
                tied(command, signal.SIGTERM),
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment, SUPERVISED: "1", "PYTHONUNBUFFERED": "1"},
            )
        finally:
            os.close(descriptor)
        return RunProcess(log, process)

    def port_of(self, fleet: str) -> int:
        """Return the first port of a fleet's embedded broker. Beyond the loopback, a fleet has three ports.

        A fleet's port does not change, because its agents store it. Only a file of an earlier version may
        hold ports that are too close to each other; then a fleet gets new ones.

        Raises:
            SettingError: no port is free.
            StoreError: the file of ports is damaged or cannot be written.
        """
        path = self.own / PORTS
        try:
            ports = msgspec.json.decode(path.read_bytes(), type=dict[str, int]) if path.exists() else {}
        except msgspec.MsgspecError:
            raise StoreError(
                f"{path} is damaged: restore it from a backup, or delete it so that each fleet gets a new"
                " port"
            ) from None
        own = ports.pop(fleet, None)
        if own is None or not self._is_apart(own, ports.values()):
            own = self._free_port(ports.values())
            write_atomically(path, msgspec.json.encode(ports | {fleet: own}))
        return own

    def _where(self, file: RunFile) -> list[str]:
        if self.environment:
            return list(self.options)
        return [*self.options, "--bind", self.bind, "--port", str(self.port_of(file.fleet))]

    @property
    def _count(self) -> int:
        return 1 if is_loopback(self.bind) else NUM_PORTS

    def _is_apart(self, port: int, others: Collection[int]) -> bool:
        return all(abs(port - other) >= self._count for other in others)

    def _free_port(self, others: Collection[int]) -> int:
        candidates = range(self.port, _HIGHEST_PORT + 2 - self._count)
        for port in (one for one in candidates if self._is_apart(one, others)) if self.port else [0]:
            with suppress(TransportError):
                return claim_ports(self.bind, port, self._count)
        raise SettingError(
            f"no free port at {self.bind}, from {self.port} up, for the embedded broker of another fleet;"
            " free one, or change --port"
        )
