"""A device that is forgotten: what goes, what the receipt says, and what an interruption leaves to do."""

import json
import shutil
from contextlib import closing

import msgspec
import pytest
from tests.coordinator.fleet.test_registry import device as registered
from tests.helpers import played_run
from tests.helpers.played_run import PlayedRun
from typer.testing import CliRunner

from fleetune.coordinator.cli import app
from fleetune.coordinator.commands.control_file import read_control
from fleetune.coordinator.fleet.fleet_folder import FleetFolder
from fleetune.coordinator.fleet.registry import Registry
from fleetune.coordinator.forgetting.forget import forget
from fleetune.coordinator.forgetting.receipt import REGISTRY
from fleetune.coordinator.run.stored_run import look_at
from fleetune.coordinator.serving.console_output import report_run
from fleetune.coordinator.store.run_folder import BROKER, INCOMING
from fleetune.coordinator.store.run_store import RunStore
from fleetune.protocols import disk
from fleetune.protocols.errors import SettingError, StoreError

GONE = "bravo-7"
NAMES = {"a": "alfa", "b": GONE, "c": "bravo-77", "d": "delta"}
LOG = (
    "1: New connection from 10.7.2.2:5001 on port 8883.",
    f"1: New client connected from 10.7.2.2:5001 as {GONE} (p4, c0, k30, u'{GONE}').",
    "2: New connection from 10.7.2.3:5001 on port 8883.",
    "2: New client connected from 10.7.2.3:5001 as bravo-77 (p4, c0, k30, u'bravo-77').",
    f"3: Client {GONE} [10.7.2.2:5001] disconnected.",
)
FLEET, RUN = "played", "run"


@pytest.fixture(autouse=True)
def _long_names(monkeypatch):
    """Names that no bytes hold by chance; one begins like another."""
    devices = {NAMES[short]: ratio for short, ratio in played_run.DEVICES.items()}
    monkeypatch.setattr(played_run, "DEVICES", devices)
    monkeypatch.setattr(played_run, "PACE", tuple(NAMES[short] for short in played_run.PACE))


@pytest.fixture
def runs(tmp_path):
    """A stopped run with a registry, logs, an incomplete payload, and a report."""
    with closing(PlayedRun(tmp_path, "fedavg", "synchronous")) as played:
        played.play(0, 11)
    with look_at(tmp_path / RUN) as run:
        report_run(run)
    with Registry.open(FleetFolder.of(FLEET, tmp_path).registry) as registry:
        for at, name in enumerate(NAMES.values()):
            registry.put(registered(name, name=f"{name} in the hall"))
            registry.note_certificates(
                name, (f"certificate of {name}", "probe"), [f"5e{at}"], ends_at=9e9, authority="x"
            )
    for path, text in {
        tmp_path / RUN / BROKER / "mosquitto.log": "".join(f"{line}\n" for line in LOG),
        tmp_path.parent / ".service" / f"{RUN}.log": f"refused: {GONE}\nround 1\n",
        tmp_path / RUN / INCOMING / GONE / "x.part": "half an update",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def traces(runs):
    """Files that contain the forgotten id and not a longer one, without its receipt and its own agent."""
    found = [path for path in runs.rglob("*") if path.is_file() and "agents" not in path.parts]
    contents = {path.name: path.read_bytes().replace(b"bravo-77", b"") for path in found}
    return [
        name
        for name, content in contents.items()
        if GONE.encode() in content and not name.startswith(f"{GONE}.")
    ]


def test_everything_goes_and_the_receipt_says_what(runs):
    receipt, path = forget(GONE, runs)
    assert traces(runs) == []
    assert receipt == msgspec.json.decode(path.read_bytes(), type=type(receipt))
    assert path.stat().st_mode & 0o777 == 0o600
    assert receipt.finished_at >= receipt.began_at
    assert receipt.removed[REGISTRY] == {"device": 1}
    of_run = receipt.removed[RUN]
    assert {"member": 1, "traffic": 1, "incomplete_payload": 1}.items() <= of_run.items()
    assert of_run["log_line"] == 3 + (runs.parent / ".service" / f"{RUN}.log").read_text().count("round 1")
    assert of_run["report_file"] == 3
    assert of_run["device_round"] > 0
    remains = [one.what for one in receipt.remains]
    assert any("shared model" in what for what in remains)
    assert any("serial numbers" in what for what in remains)
    assert (runs / RUN / BROKER / "mosquitto.log").read_text().splitlines() == [*LOG[2:4]]
    with Registry.open(FleetFolder.of(FLEET, runs).registry) as registry:
        assert registry.device(GONE) is None
        assert registry.revoked_serials(1e9) == ["5e1"]
        assert len(registry.devices()) == 3
    summary = json.loads((runs / RUN / "summary.json").read_bytes())
    assert sorted(summary["by_device"]) == ["alfa", "bravo-77", "delta"]


def test_forgetting_again_returns_the_same_receipt(runs):
    first = forget("bravo-7 in the hall", runs)
    assert forget(GONE, runs, FLEET) == first
    shown = CliRunner().invoke(app, ["forget", GONE, "--runs", str(runs)])
    assert shown.exit_code == 0
    assert "removed from registry: entry with certificates, name and tags (1)" in shown.output
    assert str(first[1]) in shown.output
    as_json = CliRunner().invoke(app, ["forget", GONE, "--runs", str(runs), "--json"])
    assert msgspec.json.decode(as_json.output, type=type(first[0])) == first[0]


def test_each_removal_of_a_device_that_joins_again_has_its_receipt(runs):
    first, path = forget(GONE, runs)
    for _ in range(2):  # a device that joined again, and was forgotten again
        with Registry.open(FleetFolder.of(FLEET, runs).registry) as registry:
            registry.put(registered(GONE))
        second, _ = forget(GONE, runs)
        text = path.with_suffix(".txt").read_text()
        assert text.startswith(f"{GONE} of fleet {FLEET} is forgotten: 20"), text
        assert second.began_at > first.began_at
    kept = list(path.parent.glob(f"{GONE}.*.json"))
    assert first in [msgspec.json.decode(one.read_bytes(), type=type(first)) for one in kept]
    assert len(kept) == 2
    assert len(list(path.parent.glob(f"{GONE}.*.txt"))) == 2


class Killed(BaseException):
    pass


class Steps(disk.Disk):
    """A disk, stores and registry that are killed before or after their n-th change."""

    def __init__(self, monkeypatch, at):
        super().__init__()
        self.count, self.at = 0, at
        for name in ("make_folder", "write", "append", "rename", "remove", "remove_folder"):
            setattr(self, name, self.counted(getattr(super(), name)))
        for kind, name in ((RunStore, "compact"), (Registry, "forget"), (Registry, "revoke")):
            monkeypatch.setattr(kind, name, self.counted(getattr(kind, name)))
        monkeypatch.setattr(disk, "DISK", self)

    def counted(self, step):
        def counted(*arguments, **more):
            self._tick()
            result = step(*arguments, **more)
            self._tick()
            return result

        return counted

    def _tick(self):
        self.count += 1
        if self.count == self.at:
            raise Killed


def killed_at(runs, monkeypatch, at):
    """Kill a removal at this step; whether it was reached."""
    with monkeypatch.context() as patch:
        Steps(patch, at)
        try:
            forget(GONE, runs)
        except Killed:
            return True
    return False


def numbers(receipt):
    return {part: dict(found) for part, found in receipt.removed.items()}


@pytest.mark.parametrize("stride", [13, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_removal_that_is_killed_at_any_step_is_completed(tmp_path_factory, runs, monkeypatch, stride):
    monkeypatch.setattr(
        "fleetune.coordinator.forgetting.run_files.report_run", lambda *_: (None, [])
    )  # pictures take long
    for name in ("report.html", "summary.json"):
        (runs / RUN / name).write_text("{}")
    wanted = None
    for at in (None, *range(1, 300, stride)):
        folder = tmp_path_factory.mktemp("killed") / "runs"
        shutil.copytree(runs, folder)
        if at is not None and not killed_at(folder, monkeypatch, at):
            break
        receipt, _ = forget(GONE, folder)
        assert traces(folder) == [], at
        assert read_control(folder / RUN).forget == ()
        wanted = wanted or numbers(receipt)
        found = numbers(receipt)
        found[RUN].pop("log_line", None)
        assert found[RUN].items() <= wanted[RUN].items(), at
        assert found[REGISTRY] == wanted[REGISTRY], at
    else:
        pytest.fail("a removal takes fewer steps than that")


def test_a_coordinator_that_does_not_answer_leaves_the_request(runs, monkeypatch):
    monkeypatch.setattr("fleetune.coordinator.forgetting.forget.PATIENCE_S", 0.3)
    with (
        closing(PlayedRun(runs, "fedavg", "synchronous")),
        pytest.raises(StoreError, match=r"has not removed bravo-7 within 0\.3 s; it will"),
    ):
        forget(GONE, runs)
    assert read_control(runs / RUN).forget == (GONE,)
    with Registry.open(FleetFolder.of(FLEET, runs).registry) as registry:
        assert registry.device(GONE).state == "revoked"
    receipt, _ = forget(GONE, runs)
    assert receipt.removed[RUN]["member"] == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("zulu",), "no device 'zulu' in the fleets in "),
        (("zulu", "--fleet", FLEET), f"no device 'zulu' in fleet {FLEET}; edge-coordinator devices lists"),
        ((GONE, "--fleet", "other"), f"no fleet 'other' in RUNS; its fleets: {FLEET}"),
    ],
)
def test_a_mistake_is_one_line(runs, words, said):
    found = CliRunner().invoke(app, ["forget", *words, "--runs", str(runs)])
    assert found.exit_code == 2
    assert said.replace("RUNS", str(runs)) in found.output
    assert found.output.count("\n") == 1


def test_an_id_that_two_fleets_know_needs_the_fleet(runs):
    with Registry.open(FleetFolder.of("other", runs).registry) as registry:
        registry.put(registered(GONE))
    with pytest.raises(SettingError, match="several fleets know 'bravo-7': other, played; choose one"):
        forget(GONE, runs)
    forget(GONE, runs, "other")
    with Registry.open(FleetFolder.of(FLEET, runs).registry) as registry:
        assert registry.device(GONE) is not None
