"""What an agent keeps can be removed, and nothing else ever is."""

import datetime as dt
import json
import os

import numpy as np
import pytest
from typer.testing import CliRunner

from fleetune.edge_agent.cli import app
from fleetune.edge_agent.state.agent_store import AgentStore, FileMemory
from fleetune.edge_agent.state.state_folder import MARKER, VERSION, agent_files, wipe
from fleetune.edge_agent.state.state_versions import Layout
from fleetune.edge_agent.stream.sample import make_sample
from fleetune.edge_agent.stream.sample_store import SampleStore
from fleetune.protocols.errors import StoreError, StoreVersion

DIGEST = "0" * 32


def a_device(folder, runs=("r1", "r2")):
    """An agent's state folder with everything that can be in one."""
    store = AgentStore(folder)
    store.claim().close()
    for run in runs:
        store.enrolment(run).write(b"enrolment")
        store.session(run).write(b"session")
        store.deployed.write(b"served")
        store.ratio_controller(run).write(b"experience")
        store.keep_task(run, DIGEST, b"task")
        store.keep_bundle(run, b"bundle")
    store.incoming.mkdir()
    (store.incoming / f"{DIGEST}.part").write_bytes(b"part")
    return store


def invoke(*words, **options):
    return CliRunner().invoke(app, ["wipe", *map(str, words)], **options)


def everything(folder):
    """Below it; the folder itself goes too when nothing is left in it."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("named", ["state", "state/f", "state/f/pi"])
def test_all_that_an_agent_keeps_goes_and_empty_folders_with_it(tmp_path, named):
    a_device(tmp_path / "state" / "f" / "pi")
    done = invoke("--state", tmp_path / named, "--yes")
    assert done.exit_code == 0, done.output
    assert not (tmp_path / "state" / "f" / "pi").exists()
    assert (
        everything(tmp_path) == {"state": [], "state/f": ["state"], "state/f/pi": ["state", "state/f"]}[named]
    )


def test_the_question_names_devices_runs_and_bytes_and_no_removes_nothing(tmp_path):
    a_device(tmp_path / "f" / "pi")
    a_device(tmp_path / "f" / "zero", runs=("r1",))
    num_bytes = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    before = everything(tmp_path)
    done = invoke("--state", tmp_path, input="n\n")
    assert done.exit_code == 1
    assert done.output.splitlines()[-1] == "nothing was removed"
    assert invoke("--state", tmp_path, input="").exit_code == 1  # nothing can answer
    assert "2 devices (pi, zero) learned in 3 runs" in done.output
    assert f"{num_bytes:,} bytes" in done.output
    assert "pi: 2 runs (r1, r2)" in done.output
    assert everything(tmp_path) == before
    assert invoke("--state", tmp_path, input="y\n").exit_code == 0
    assert everything(tmp_path) == []


def test_a_home_is_left_as_it_is(tmp_path):
    for name in ("letter", "photos/2026/cat.png", "runs/r1/session", "lock", "bundles/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"mine")
    (tmp_path / "empty").mkdir()
    before = everything(tmp_path)
    done = invoke("--state", tmp_path, "--yes")
    assert done.exit_code == 2
    assert "no agent stores anything here" in done.output
    assert len(done.output.splitlines()) == 1
    assert everything(tmp_path) == before


def test_files_of_others_in_an_agents_folder_stay_and_are_named(tmp_path):
    folder, mine = tmp_path / "f" / "pi", tmp_path / "mine"
    a_device(folder)
    mine.mkdir()
    (mine / "session").write_bytes(b"mine")
    for name in ("notes", "runs/r1/notes", "runs/notes", "runs/r1/task-of-mine"):
        (folder / name).write_bytes(b"mine")
    (folder / "runs" / "r3").symlink_to(mine)
    (folder / "runs" / "r2" / "session").unlink()
    (folder / "runs" / "r2" / "session").symlink_to(mine / "session")
    done = invoke("--state", tmp_path, "--yes")
    assert done.exit_code == 0
    left = ["notes", "runs/notes", "runs/r1/notes", "runs/r1/task-of-mine", "runs/r2/session", "runs/r3"]
    assert [name for name in everything(folder) if not (folder / name).is_dir() or name == "runs/r3"] == left
    assert sum("not removed, because no agent" in line for line in done.output.splitlines()) == len(left)
    assert (mine / "session").read_bytes() == b"mine"


def test_nothing_is_removed_while_one_of_the_agents_runs(tmp_path):
    a_device(tmp_path / "f" / "a")
    running = a_device(tmp_path / "f" / "b").claim()
    before = everything(tmp_path)
    done = invoke("--state", tmp_path, "--yes")
    assert done.exit_code == 2
    assert "another agent uses" in done.output.splitlines()[-1]
    assert everything(tmp_path) == before
    running.close()
    assert invoke("--state", tmp_path, "--yes").exit_code == 0
    assert everything(tmp_path) == []


@pytest.mark.parametrize("other", [VERSION - 1, VERSION + 1])
def test_state_of_another_format_is_refused_left_unchanged_and_can_be_wiped(tmp_path, other):
    store = a_device(tmp_path / "f" / "pi")
    (store.folder / MARKER).write_text(f'{{"version": {other}, "more": 1}}')
    (store.folder / "of_that_format").write_bytes(b"more")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    line = f"state folder .*pi has format {other}; this program reads format {VERSION}: .*edge-agent wipe"
    with pytest.raises(StoreVersion, match=line):
        store.claim()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    done = invoke("--state", tmp_path, "--yes")
    assert done.exit_code == 0
    assert "of_that_format" in done.output.splitlines()[-1]
    assert everything(tmp_path) == ["f", "f/pi", "f/pi/of_that_format"]


READING = {
    "explain": (),
    "export": ("--out", "x.onnx"),
    "predict": ("--data", "digits"),
    "models": (),
    "rollback": (),
    "samples": (),
}


@pytest.mark.parametrize("command", READING)
def test_no_command_reads_a_part_of_the_state_of_format_2(tmp_path, command):
    """Format 2 had the deployed model in `served`, so a device seemed to have none."""
    store = a_device(tmp_path / "f" / "pi", runs=())
    FileMemory(store.folder / "served", Layout(first=2)).write(b"model")
    (store.folder / MARKER).write_text('{"version": 2}')
    words = [command, "--fleet", "f", "--state", str(tmp_path), *READING[command]]
    done = CliRunner().invoke(app, words)
    line = f"pi has format 2; this program reads format {VERSION}: install"
    assert (done.exit_code, line in done.output) == (2, True), done.output
    assert len(done.output.splitlines()) == 1
    assert "edge-agent wipe" in done.output
    assert invoke("--state", tmp_path, "--yes").exit_code == 0
    assert everything(tmp_path) == []


def test_state_without_any_version_is_refused_and_left_unchanged(tmp_path):
    enrolment = tmp_path / "f" / "pi" / "runs" / "r1" / "enrolment"
    enrolment.parent.mkdir(parents=True)
    enrolment.write_bytes(b"FLTN and so on")
    with pytest.raises(StoreVersion, match=f"has format 0; this program reads format {VERSION}"):
        AgentStore(tmp_path / "f" / "pi").claim()
    assert not (tmp_path / "f" / "pi" / MARKER).exists()
    assert agent_files(tmp_path) == []


def test_a_wipe_that_was_cut_short_can_be_done_again(tmp_path):
    a_device(tmp_path / "f" / "pi")
    (found,) = agent_files(tmp_path)
    for path in found.files:
        if path.name not in (MARKER, "lock"):
            path.unlink()
    wipe(tmp_path, agent_files(tmp_path))
    assert everything(tmp_path) == []


def test_an_agent_that_waited_at_the_door_of_a_folder_that_was_wiped_locks_the_new_one(tmp_path, monkeypatch):
    import fcntl

    store, flock = AgentStore(tmp_path / "pi"), fcntl.flock
    store.claim().close()

    def wiped_first(file, how):
        monkeypatch.setattr(fcntl, "flock", flock)
        (tmp_path / "pi" / "lock").unlink()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", wiped_first)
    held = store.claim()
    assert os.path.samestat(os.fstat(held.fileno()), (tmp_path / "pi" / "lock").stat())
    with pytest.raises(StoreError, match="another agent uses"):
        store.claim()
    held.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_none_of_ours(tmp_path):
    (tmp_path / "secret").mkdir(mode=0)
    assert agent_files(tmp_path) == []


def test_one_device_goes_and_the_others_stay(tmp_path):
    for name in ("f/pi", "f/zero", "g/pi"):
        a_device(tmp_path / name)
    done = invoke("--state", tmp_path, "--fleet", "f", "--device", "tv", "--yes")
    assert done.exit_code == 2
    assert "no device f/tv stores anything here; stored are f/pi, f/zero, g/pi" in done.output
    done = invoke("--state", tmp_path, "--fleet", "f", "--device", "pi", "--json", input="n\n")
    assert done.exit_code == 1
    assert json.loads(done.stdout.splitlines()[-1]) == {"removed": False, "devices": []}
    done = invoke("--state", tmp_path, "--fleet", "f", "--device", "pi", "--json", "--yes")
    told = json.loads(done.stdout)
    assert told["removed"]
    assert [(one["folder"], one["runs"]) for one in told["devices"]] == [
        (str(tmp_path / "f/pi"), ["r1", "r2"])
    ]
    assert [one.folder.relative_to(tmp_path).as_posix() for one in agent_files(tmp_path)] == [
        "f/zero",
        "g/pi",
    ]
    assert invoke("--state", tmp_path, "--device", "pi", "--yes").exit_code == 0
    assert [one.folder.name for one in agent_files(tmp_path)] == ["zero"]


DAY_S = 86_400.0


def test_one_sample_or_one_day_goes_and_the_rest_stays(tmp_path):
    store = a_device(tmp_path / "f" / "pi")
    now = 1_780_000_000.0
    for day in range(3):
        samples = SampleStore.open(store.samples, wall=lambda day=day: now + day * DAY_S)
        samples.add([make_sample(np.full(4, 10 * day + index), 0, f"{day}-{index}") for index in range(2)])
        samples.close()
    before = everything(tmp_path)

    def names():
        samples = SampleStore.open(store.samples)
        try:
            return {name for (name,) in samples._connection.execute("SELECT name FROM sample")}
        finally:
            samples.close()

    done = invoke("--state", tmp_path, "--sample", "1-0", input="n\n")
    assert (done.exit_code, done.output.splitlines()[-1]) == (1, "nothing was removed")
    assert len(names()) == 6
    done = invoke("--state", tmp_path, "--sample", "1-0", "--yes")
    assert done.exit_code == 0
    assert "removed 1 sample; models trained on these samples cannot unlearn them" in done.output
    assert names() == {"0-0", "0-1", "1-1", "2-0", "2-1"}
    done = invoke("--state", tmp_path, "--sample", "0-0", "--sample", "1-0", "--yes")
    assert done.exit_code == 2
    assert "no sample '1-0' is stored in " in done.output
    day = dt.datetime.fromtimestamp(now + 2 * DAY_S).astimezone().date().isoformat()
    done = invoke("--state", tmp_path, "--device", "pi", "--day", day, "--yes", "--json")
    assert json.loads(done.stdout) == {
        "removed": True,
        "devices": [{"folder": str(tmp_path / "f/pi"), "samples": 2}],
    }
    assert names() == {"0-0", "0-1", "1-1"}
    for words in (("--day", "yesterday"), ("--day", day, "--sample", "0-0"), ("--day", day)):
        assert invoke("--state", tmp_path, *words, "--yes").exit_code == 2
    assert len(names()) == 3
    assert everything(tmp_path) == before  # models and all else stay
