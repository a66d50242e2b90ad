"""A run.toml's fleet as real processes: each agent behind the link, and with the data, of its double."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from benchmarks.shaped_links.measured_boards import board_file
from fleetune.coordinator.fleet.authority import Authority
from fleetune.coordinator.fleet.fleet_address import FleetAddress
from fleetune.coordinator.fleet.fleet_folder import FleetFolder
from fleetune.coordinator.fleet.invitations import invite
from fleetune.coordinator.fleet.registry import Registry
from fleetune.coordinator.metrics.summary import SUMMARY
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.coordinator.run.round_journal import ROUNDS
from fleetune.protocols.errors import SettingError
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.run_toml import read_run
from fleetune.protocols.wire.join_exchange import JoinLine
from fleetune.tools.links.link import Constant, Trace
from fleetune.tools.links.network_namespaces import HUB_ADDRESS, Network
from fleetune.tools.simulator.device_specs import device_specs
from fleetune.tools.simulator.write_device_files import write_device_files

PORT = 8883
PATIENCE_S = 4 * 3600.0
LOOK_S = 0.1
STOP_S = 20.0  # seconds after which a process is killed
BEGUN = "round 1: training"  # a line of an agent's log
INVITES = "to let a device join"  # of the coordinator's


def run_real_fleet(
    run_file: Path, changes: Sequence[str], folder: Path, boards: Path | None = None
) -> list[RoundRecord]:
    """Run real agents and return the rounds without the final evaluation.

    Args:
        run_file: settings of the run.
        changes: `section.key=value` on top of it.
        folder: a new folder for the files of coordinator and agents.
        boards: folder of the agents' board files; None: agents detect their board.

    Raises:
        SettingError: no network namespaces, or a process failed; the message has the end of its log.
    """
    settings = read_run(run_file, changes)
    links = emulated_links(settings)
    folder.mkdir(parents=True)
    shares = list(write_device_files(settings, folder / "data"))
    network = Network(list(links.values()), traces_wait=True)
    with network, closing(_Fleet(network, folder)) as fleet:
        fleet.serve(run_file, changes)
        invitation = fleet.invite(settings.run.name, len(links))
        for device, share, namespace in zip(links, shares, network.agents, strict=True):
            board = [] if boards is None else ["--board", str(board_file(boards, device))]
            fleet.join(device, share, namespace, invitation, board)
        fleet.watch(lambda: any(BEGUN in log.read_text() for log in fleet.logs))
        network.start_traces()  # as on the virtual clock, traces start with the first round
        fleet.watch((folder / settings.run.name / SUMMARY).exists)
    return training_rounds(folder / settings.run.name)


def emulated_links(settings: RunSettings) -> dict[str, Constant | Trace]:
    """Each device's link, by name.

    Raises:
        SettingError: a link that network namespaces cannot emulate.
    """
    links = {one.name: one.link for one in device_specs(settings.fleet, settings.run.seed)}
    emulated = {name: link for name, link in links.items() if isinstance(link, Constant | Trace)}
    if strange := sorted(links.keys() - emulated.keys()):
        raise SettingError(f"the link of {strange[0]} cannot be emulated; use a rate or a trace")
    return emulated


def training_rounds(folder: Path) -> list[RoundRecord]:
    """Read the rounds of a run's folder without the final evaluation."""
    lines = (folder / ROUNDS).read_bytes().splitlines()
    records = [msgspec.json.decode(line, type=RoundRecord) for line in lines]
    return [record for record in records if not record.final_evaluation]


@dataclass
class _Fleet:
    """The processes of a fleet.

    Attributes:
        logs: log files of the agents.
    """

    network: Network
    folder: Path
    logs: list[Path] = field(default_factory=list)
    _running: "dict[str, subprocess.Popen[bytes]]" = field(default_factory=dict)

    def serve(self, run_file: Path, changes: Sequence[str]) -> None:
        """Start a coordinator with its own broker in the hub."""
        words = ["serve", str(run_file), "--bind", HUB_ADDRESS, "--port", str(PORT)]
        words += ["--runs", str(self.folder), *(word for one in changes for word in ("--set", one))]
        self._start("coordinator", self.network.hub, ["fleetune.coordinator.cli", *words])

    def invite(self, fleet: str, devices: int) -> str:
        """Wait until devices can join, and return an invitation for all of them."""
        self.watch(lambda: INVITES in self._log("coordinator").read_text())
        files = FleetFolder.of(fleet, self.folder)
        with Registry.open(files.registry) as registry:
            _, code = invite(registry, time.time(), devices=devices, expires_s=PATIENCE_S)
        address, fingerprint = FleetAddress.read(files), Authority(files).fingerprint
        return str(JoinLine(HUB_ADDRESS, address.join_port, fleet, code, fingerprint))

    def join(self, device: str, share: Path, namespace: str, invitation: str, more: Sequence[str]) -> None:
        """Join with an agent behind its link, and start it with `more` options."""
        state = ["--state", str(self.folder / "state" / device)]
        module = ["fleetune.edge_agent.cli", "join", "--device", device, *state]
        self._start(device, namespace, module, FLEETUNE_JOIN=invitation)
        self.watch(lambda: self._running[device].poll() == 0)
        words = ["run", "--data", f"npz:{share}", "--trainer", "onnx", *state, "--leave-after-run", *more]
        self._start(device, namespace, ["fleetune.edge_agent.cli", *words])
        self.logs.append(self._log(device))

    def watch(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds.

        Raises:
            SettingError: a process failed, or the wait took too long.
        """
        give_up_at = time.monotonic() + PATIENCE_S
        while not condition():
            failed = [name for name, one in self._running.items() if one.poll() not in (None, 0)]
            if failed or time.monotonic() > give_up_at:
                name = failed[0] if failed else "coordinator"
                raise SettingError(f"the {name} failed: {self._log(name).read_text()[-500:]}")
            time.sleep(LOOK_S)

    def close(self) -> None:
        """End all processes."""
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, name: str, namespace: str, module: list[str], **variables: str) -> None:
        command = self.network.command(namespace, sys.executable, "-P", "-m", *module)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **variables}
        with self._log(name).open("wb") as log:
            self._running[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"
