"""Starts the process of one run (`edge-coordinator serve`) and limits the size of its log file."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fleetune.coordinator.broker.embedded_broker import claim_port
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
        """Return the port of a fleet's embedded broker.

        A fleet's port never changes, because its agents store it.

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
        if fleet not in ports:
            ports[fleet] = self._free_port(set(ports.values()))
            write_atomically(path, msgspec.json.encode(ports))
        return ports[fleet]

    def _where(self, file: RunFile) -> list[str]:
        if self.environment:
            return list(self.options)
        return [*self.options, "--bind", self.bind, "--port", str(self.port_of(file.fleet))]

    def _free_port(self, given: set[int]) -> int:
        candidates = (port for port in range(self.port, _HIGHEST_PORT + 1) if port not in given)
        for port in candidates if self.port else [0]:
            with suppress(TransportError):
                return claim_port(self.bind, port)
        raise SettingError(
            f"no free port at {self.bind}, from {self.port} up, for the embedded broker of another fleet;"
            " free one, or change --port"
        )
