"""What a service does about its runs, with processes that are made up and a clock that is moved."""

import os
import signal
import threading
from contextlib import closing
from itertools import pairwise

import msgspec
import pytest
from tests.helpers.fleet_processes import run_toml, wait_until
from typer.testing import CliRunner

from fleetune.coordinator.broker.embedded_broker import claim_ports
from fleetune.coordinator.cli import app
from fleetune.coordinator.commands.commands import Pause, Start, Stop, apply
from fleetune.coordinator.extensions.rollout import Rollout
from fleetune.coordinator.rounds.records import DeviceRound, RoundRecord
from fleetune.coordinator.run.open_or_resume import open_run
from fleetune.coordinator.run.stored_run import mark_finished
from fleetune.coordinator.service import run_files
from fleetune.coordinator.service.run_files import RunFiles
from fleetune.coordinator.service.run_process import PORTS, Launcher
from fleetune.coordinator.service.service import OWN, RUNS, Service, folder_of, held, read_statuses
from fleetune.coordinator.service.supervisor import LONGEST_RETRY_S, STEADY_S, Supervisor
from fleetune.coordinator.store.run_folder import STATE
from fleetune.coordinator.store.run_store import RunStore
from fleetune.protocols.errors import SettingError
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.settings.run_toml import read_run
from fleetune.protocols.wire.payloads import Measures


class FakeProcess:
    def __init__(self, file):
        self.file, self.code, self.signals, self.pid = file, None, [], 4711

    def poll(self):
        return self.code

    def send_signal(self, number):
        self.signals.append(number)

    def last_words(self):
        return "what it said last"


class World:
    """A folder with run.toml files, and a supervisor of them."""

    def __init__(self, folder):
        self.folder, self.now, self.begun = folder, 0.0, []
        self.files, self.supervisor = RunFiles(folder), Supervisor(folder / RUNS, self.launch)

    def launch(self, file):
        self.begun.append(FakeProcess(file))
        return self.begun[-1]

    def write(self, file, **keys):
        text = keys.pop("text", None)
        draft = self.folder / "draft"
        draft.write_text(run_toml(**keys) if text is None else text)
        draft.replace(self.folder / file)

    def look(self, after_s=1.0):
        self.now += after_s
        self.supervisor.look(self.files.look(), self.now)

    def state(self, file):
        one = self.supervisor.watched[self.folder / file]
        return one.state, one.words

    def process(self, name):
        return next(one for one in reversed(self.begun) if one.file.name == name)

    def begin_run(self, file, *, finished=False, changes=()):
        """As its process would have; the run's folder."""
        settings = read_run(self.folder / file, changes)
        run = open_run(settings, self.folder / RUNS / settings.run.name, durable=False)
        if finished:
            mark_finished(run)
        run.store.close()
        return run.folder


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    made.write("a.toml", name="one")
    made.write("b.toml", name="two")
    made.look()
    return made


def test_each_file_is_a_process_and_a_wrong_one_is_a_line_and_nothing_else(world):
    world.write("c.toml", text="[run]\nname = 3\n")
    world.write("d.toml", name="one")
    world.look()
    assert [one.file.name for one in world.begun] == ["one", "two"]
    assert world.state("c.toml") == ("wrong", f"{world.folder}/c.toml: run.name: expected `str`, got `int`")
    assert world.state("d.toml")[1] == f'{world.folder}/d.toml: run.name = "one" is that of a.toml already'
    world.write("c.toml", name="three")
    world.look()
    assert world.begun[-1].file.name == "three"


def test_a_running_run_keeps_its_name_from_a_new_file(world):
    """Also from one whose path comes first."""
    world.write("_.toml", name="two")
    for _ in range(3):
        world.look()
    assert world.state("_.toml") == (
        "wrong",
        f'{world.folder}/_.toml: run.name = "two" is that of b.toml already',
    )
    assert world.state("b.toml")[0] == "running"
    assert [one.file.name for one in world.begun] == ["one", "two"]


def test_files_that_no_settings_can_be_in_cost_a_line_each_and_the_service_still_ends(world):
    nested, digits, huge = "x = " + "[" * 200_000, "[run]\nseed = " + "9" * 10_000, world.folder / "huge.toml"
    world.write("nested.toml", text=nested)
    world.write("digits.toml", text=digits)
    os.mkfifo(world.folder / "pipe.toml")
    (world.folder / "zero.toml").symlink_to("/dev/zero")
    (world.folder / "folder.toml").mkdir()
    with huge.open("wb") as file:
        file.truncate(10**12)
    world.write("c.toml", name="three")
    service = Service(world.folder, world.supervisor)
    thread = threading.Thread(target=service.run, daemon=True)
    thread.start()
    wait_until(lambda: len(world.begun) == 3, "the run of a good file is begun")
    names = ("nested", "digits", "pipe", "zero", "folder", "huge")
    states = {name: world.state(f"{name}.toml") for name in names}
    for one in world.begun:
        one.code = 0
    service.stopping.set()
    thread.join(30)
    assert not thread.is_alive()
    assert {state for state, _ in states.values()} == {"wrong"}
    expected = ("nested deeper", "too many digits", "named pipe", "a device", "a folder", "1,000.0 GB")
    for name, words in zip(names, expected, strict=True):
        assert states[name][1].startswith(f"{world.folder}/{name}.toml")
        assert words in states[name][1]
        assert "\n" not in states[name][1]


def test_a_file_that_brings_about_a_fault_of_ours_harms_only_itself(world, monkeypatch):
    def read(path):
        if path.name == "c.toml":
            raise RuntimeError("never seen\nbefore")
        return read_run(path)

    monkeypatch.setattr(run_files, "read_run", read)
    world.write("c.toml", name="three")
    world.look()
    assert world.state("c.toml") == (
        "wrong", f"{world.folder}/c.toml: unexpected RuntimeError (never seen before)"
    )  # fmt: skip
    assert world.state("a.toml")[0] == "running"


def test_what_crashes_is_begun_again_ever_later_and_at_once_when_its_file_changes(world):
    pauses, at = [], world.now
    for _ in range(12):
        world.process("one").code = 1
        count = len(world.begun)
        world.look(0.0)
        assert world.state("a.toml")[0] == "failed"
        assert "what it said last" in world.state("a.toml")[1]
        at = world.now
        while len(world.begun) == count:
            world.look(0.5)
        pauses.append(world.now - at)
    assert pauses[:4] == [1.0, 2.0, 4.0, 8.0]
    assert pauses[-1] == LONGEST_RETRY_S
    assert world.process("two").signals == []
    world.process("one").code = 2
    world.look()
    world.write("a.toml", name="one", rounds=9)
    count = len(world.begun)
    world.look()
    assert len(world.begun) == count + 1
    world.look(STEADY_S)
    world.process("one").code = 1
    world.look()
    assert "after 1 s" in world.state("a.toml")[1], "it was up for long"


def test_a_changed_file_is_taken_up_if_the_run_can_go_on_with_it(world):
    world.begin_run("a.toml")
    store_of = world.folder / RUNS / "one"
    world.write("a.toml", name="one", rounds=9)
    world.look()
    first = world.process("one")
    assert first.signals == [signal.SIGTERM]
    assert world.state("a.toml") == ("ending", "its settings have changed")
    world.look(31.0)
    assert first.signals == [signal.SIGTERM, signal.SIGKILL], "it did not end by itself"
    first.code = -9
    world.look()
    assert world.process("one") is not first
    assert world.state("a.toml")[0] == "running"
    assert store_of.exists()


def test_a_change_that_the_run_cannot_take_costs_a_line(world, monkeypatch):
    from fleetune.coordinator.service import supervisor

    asked = []

    def refuse(folder, settings):
        asked.append(settings.training.epochs)
        raise SettingError("training.epochs was 1 and is 7 now")

    monkeypatch.setattr(supervisor, "check_fits", refuse)
    world.write("a.toml", name="one", epochs=7)
    for _ in range(3):
        world.look()
    assert asked == [7], "looked at once"
    assert world.process("one").signals == []
    assert world.state("a.toml") == (
        "running",
        "with its settings from before: training.epochs was 1 and is 7 now",
    )
    world.write("a.toml", text="no toml")
    world.look()
    assert world.state("a.toml")[0] == "running"
    assert world.process("one").signals == []


def test_a_removed_file_ends_its_run_and_its_folder_stays(world):
    world.begin_run("a.toml")
    (world.folder / "a.toml").unlink()
    world.look()
    assert world.process("one").signals == [signal.SIGTERM]
    world.process("one").code = 0
    world.look()
    assert list(world.supervisor.watched) == [world.folder / "b.toml"]
    assert (world.folder / RUNS / "one" / "state.sqlite").exists()


def test_a_stopped_run_stays_stopped_also_for_the_next_service_until_it_is_started(world):
    run = world.folder / RUNS / "one"
    apply(Stop(), run)
    world.process("one").code = 0  # it saw the order itself
    for _ in range(3):
        world.look()
    assert world.state("a.toml") == ("stopped", "as ordered")
    again = World(world.folder)
    again.look()
    assert [one.file.name for one in again.begun] == ["two"]
    apply(Start(), run)
    again.look()
    assert again.begun[-1].file.name == "one"


def test_a_finished_run_is_not_begun_again_until_its_rounds_are_raised(world):
    world.begin_run("a.toml", finished=True)
    world.process("one").code = 0
    for _ in range(4):
        world.look()
    assert world.state("a.toml")[0] == "finished"
    count = len(world.begun)
    world.write("a.toml", name="one", rounds=99)
    world.look()
    assert len(world.begun) == count + 1


def test_one_that_somebody_else_stopped_is_begun_again(world):
    world.process("one").code = 0
    world.look()
    world.look(2.0)
    assert world.state("a.toml")[0] == "running"


def test_a_fleet_has_one_run_at_a_time(world):
    world.write("c.toml", text=run_toml(name="three").replace("[model]", 'fleet = "one"\n[model]', 1))
    world.look()
    assert world.state("c.toml") == ("waiting", "fleet one is served by run one")
    world.begin_run("a.toml", finished=True)
    world.process("one").code = 0
    for _ in range(4):
        world.look()
    assert world.state("c.toml")[0] == "running"
    assert world.state("a.toml")[0] == "finished"


def test_at_its_end_it_ends_all_and_whoever_does_not_hear_is_killed(world):
    assert not world.supervisor.end(world.now)
    assert [one.signals for one in world.begun] == [[signal.SIGTERM]] * 2
    world.process("one").code = 0
    assert not world.supervisor.end(world.now + 1)
    world.supervisor.end(world.now + 31)
    assert world.process("two").signals == [signal.SIGTERM, signal.SIGKILL]
    world.process("two").code = -9
    assert world.supervisor.end(world.now + 32)


def test_who_is_where_is_kept_and_named(world):
    with held(world.folder):
        service = Service(world.folder, world.supervisor)
        service._note()
        with pytest.raises(SettingError, match="another service"), held(world.folder):
            pass
    assert [(one.name, one.state, one.pid) for one in read_statuses(world.folder)] == [
        ("one", "running", 4711),
        ("two", "running", 4711),
    ]
    assert folder_of("one", world.folder) == world.folder / RUNS / "one"
    with pytest.raises(SettingError, match="did you mean 'one'"):
        folder_of("on", world.folder)
    with pytest.raises(SettingError, match="holds no run"):
        folder_of("one", world.folder / RUNS)
    assert (world.folder / OWN).stat().st_mode & 0o777 == 0o700


def test_each_fleet_keeps_its_port(tmp_path):
    launcher = Launcher(tmp_path / RUNS, tmp_path, port=0)
    first, second = launcher.port_of("a"), launcher.port_of("b")
    assert first != second
    assert Launcher(tmp_path / RUNS, tmp_path, port=0).port_of("a") == first


def test_beyond_the_loopback_a_fleet_has_three_ports_also_if_an_older_file_left_no_room(tmp_path):
    first = claim_ports("127.0.0.1", 0, 20)
    (tmp_path / PORTS).write_text(f'{{"a": {first}, "b": {first + 1}, "c": {first + 9}}}')
    launcher = Launcher(tmp_path / RUNS, tmp_path, bind="0.0.0.0", port=first)
    ports = {fleet: launcher.port_of(fleet) for fleet in ("c", "a", "b", "d")}
    assert (ports["c"], ports["b"]) == (first + 9, first + 1)
    assert min(b - a for a, b in pairwise(sorted(ports.values()))) >= 3
    assert {fleet: launcher.port_of(fleet) for fleet in ports} == ports
    assert Launcher(tmp_path / RUNS, tmp_path, port=first).port_of("b") == first + 1


def test_status_of_a_service_is_a_line_a_run(world):
    world.write("c.toml", text="[run]\nname = 3\n")
    world.begin_run("a.toml")
    apply(Pause(), world.folder / RUNS / "one")
    world.look()
    (world.folder / OWN).mkdir()
    Service(world.folder, world.supervisor)._note()
    result = CliRunner().invoke(app, ["status", str(world.folder)])
    assert result.exit_code == 0, result.output
    assert "run.name: expected `str`, got `int`" in result.output
    assert "no service is at work here" in result.output
    assert "waits for its first device" not in result.output, "nobody is at it"


def test_status_of_a_service_tells_of_adoption_and_versions_where_there_are_any(world):
    """What each device told last counts, and a run that has nothing of the kind leaves its cells empty."""
    told = [
        {"a": {"adopted": False, "gain": -0.5}, "b": {"adopted": True, "gain": 0.01}},
        {"a": {"adopted": True, "gain": 0.03}, "c": {}},
    ]
    (world.folder / OWN).mkdir()
    Service(world.folder, world.supervisor)._note()
    before = CliRunner().invoke(app, ["status", str(world.folder)]).output
    assert "adopted" not in before
    assert "version" not in before

    world.begin_run("b.toml")
    run = world.begin_run("a.toml", changes=["adoption.enabled=true"])
    with closing(RunStore.open(run / STATE, durable=False)) as store, store.step():
        for number, of_devices in enumerate(told, 1):
            replies = {
                device: DeviceRound(1.0, 0, 0, Measures(10, 5, **words), RoundCost())
                for device, words in of_devices.items()
            }
            store.put_device_rounds(number, 1, replies)
            store.add_record(RoundRecord(number, 1, False, 0.0, 1.0, tuple(replies), replies))
        store.put("rollout", msgspec.json.encode(Rollout(approved=4, trial=7, canaries=("a",))))
    result = CliRunner().invoke(app, ["status", str(world.folder)])
    assert result.exit_code == 0, result.output
    head, one, two, *_ = result.output.splitlines()
    assert head.split() == ["run", "fleet", "state", "round", "devices", "adopted", "version"]
    assert "2 of 2, +2.0 points over local-only (-4.3 to +8.3)  4 is out, 7 on trial" in one
    assert "alone" not in two
    assert "out" not in two


def test_orders_from_the_command_line(world):
    world.begin_run("a.toml")
    run = world.folder / RUNS / "one"
    for command, said in [("pause", "no new round opens until it is resumed; no coordinator is at it")]:
        result = CliRunner().invoke(app, [command, str(run)])
        assert said in result.output
    for command in ("resume", "stop", "start"):
        assert CliRunner().invoke(app, [command, str(run)]).exit_code == 0
    result = CliRunner().invoke(app, ["pause", "nobody", "--service", str(world.folder)])
    assert result.exit_code == 2
    assert (run / "control.json").is_file()
