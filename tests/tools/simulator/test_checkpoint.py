"""A simulation that was stopped goes on where its last round ended, and ends as if it never had been."""

import re
import sqlite3
import subprocess
import sys
import time
from contextlib import closing

import pytest
from msgspec import UNSET
from msgspec.structs import replace
from tests.helpers.nightly import sooner
from tests.tools.simulator.test_simulate import BASE, settings

from fleetune.coordinator.run.run_controller import RunController
from fleetune.coordinator.run.run_events import Notice
from fleetune.coordinator.store.run_folder import STATE
from fleetune.coordinator.store.run_store import RunStore
from fleetune.protocols.errors import SettingError, StoreError
from fleetune.protocols.methods import REGISTRY
from fleetune.tools.simulator.checkpoint import checkpoints
from fleetune.tools.simulator.runner import simulate, write_results
from fleetune.tools.simulator.workers import worker

FLEET = BASE["fleet"] | {"jitter": 0.3, "spread": 0.4}
WIDE = BASE["fleet"] | {"jitter": 1.0, "spread": 1.0, "uplink_mbps": 20.0, "downlink_mbps": 20.0}
LATE = {"fleet": WIDE | {"ratios": [0.2, 1.0]}, "round": {"deadline_s": 0.007, "quorum": 2}}
THIN = {"fleet": FLEET | {"uplink_mbps": 0.2, "downlink_mbps": 1.0, "ratios": [0.2, 1.0]}}
ARRIVALS = {"first": 60, "per_day": 40, "times_a_day": 3}
GROWING = {
    "method": {"name": "fedavg"},
    "data": {
        "source": "digits",
        "partition": {"kind": "iid", "test_fraction": 0.5},
        "arrivals": ARRIVALS,
    },
    "fleet": {"devices": 2, "boards": {"raspberry-pi-4b": 2}, "days": 3},
    "schedule": {"first_rounds": 2, "every": "10h"},
}
CASES = {
    "chosen ratios": {},
    "late devices": LATE,
    "late tasks": {
        "fleet": THIN["fleet"] | {"uplink_mbps": 2.0, "downlink_mbps": 0.2},
        "round": {"deadline_s": 0.2, "quorum": 2},
    },
    "devices that come and go": {
        "fleet": THIN["fleet"] | {"availability": 0.6},
        "round": {"deadline_s": 0.45, "quorum": 2, "start_with": 2},
    },
    "batteries that end": {"fleet": FLEET | {"batteries": [0.0005, 0.02]}, "round": {"quorum": 1}},
    "proposals": {**LATE, "fleet": WIDE, "objective": {"minimise": "time"}},
    "least energy": {**LATE, "fleet": WIDE, "objective": {"minimise": "energy"}},
    "quick masks": {**LATE, "fleet": WIDE, "method": {"name": "fedpurin"}, "encoding": {"quick_masks": True}},
    "fewest bytes": {"fleet": FLEET, "objective": {"minimise": "bytes"}, "encoding": {"up": "int4"}},
    "lossy both ways": {**LATE, "encoding": {"up": "int4", "down": "int8"}},
    "who takes part": {"fleet": FLEET, "round": {"participants": 3, "prefer": "tiers"}},
    "semi-asynchronous": {
        "method": {"name": "fedavg"},
        "fleet": WIDE,
        "round": {"mode": "buffer", "buffer": 2},
    },
    "semi-asynchronous, differences": {
        "method": {"name": "fedavg"},
        "fleet": WIDE,
        "round": {"mode": "buffer", "buffer": 2, "participants": 4},
        "encoding": {"up": "int4", "down": "int8"},
    },
    "semi-asynchronous, in windows": {
        "method": {"name": "srp-pfed"},
        "fleet": WIDE | {"availability": 0.7},
        "round": {"mode": "window", "window_s": 0.004, "deadline_s": 0.05, "start_with": 2},
    },
    "gated, and alone": {"method": {"name": "fedavg"}, "adoption": {"enabled": True, "confidence": 0.5}},
    "canaries": {
        "method": {"name": "fedavg"},
        "adoption": {"enabled": True, "compare_alone": 0, "canary": 0.5, "watch": 2, "held_out": 0.5},
    },
    "optimisers remember": {
        "training": {"optimiser": "adamw", "optimiser_state": "device", "learning_rate": 0.01},
        "method": {"name": "fedavg"},
    },
    "data that grow": GROWING,
    "data that grow and drift": {
        **GROWING,
        "data": GROWING["data"] | {"arrivals": {**ARRIVALS, "change": {"day": 2, "kind": "invert"}}},
        "fleet": GROWING["fleet"] | {"spread": 0.5, "batteries": [0.1, 0.3]},
        "schedule": {"first_rounds": 2, "every": "6h", "new_samples": 5},
    },
    **{f"method {name}": {"method": {"name": name}} for name in sorted(REGISTRY)},
}
OTHERS = [name for name in CASES if not name.startswith("method")]
KEPT = (
    *("devices that come and go", "proposals", "lossy both ways", "semi-asynchronous, differences"),
    *("optimisers remember", "data that grow and drift"),
)

TOML = """
run = { name = "sim", rounds = 40 }
model = { name = "mlp" }
method = { name = "fedspu" }
data = { source = "digits", partition = { kind = "iid", samples = 60 } }
fleet = { devices = 6, ratios = [0.4, 1.0] }
"""
DEADLINE_S = 200


class Stop(BaseException):
    """As Ctrl-C, or a kill: nobody catches it."""


def wanted(case, rounds=5):
    return settings(**{"run": {"name": "sim", "rounds": rounds}, **case})


@pytest.fixture
def stopping(monkeypatch):
    """Ends simulations between two pieces of work, of devices and of the coordinator, after so many."""
    left = [10**9]

    def counted(whole):
        def one_piece(*arguments, **named):
            left[0] -= 1
            if left[0] < 0:
                raise Stop
            return whole(*arguments, **named)

        return one_piece

    monkeypatch.setattr(worker, "train", counted(worker.train))
    monkeypatch.setattr(worker, "receive_samples", counted(worker.receive_samples))
    monkeypatch.setattr(RunController, "receive", counted(RunController.receive))

    def after(pieces):
        left[0] = pieces

    return after


def figures(run, summary):
    """What must be the same; an enrolment holds the run's own random id, so that its bytes may be others, and
    no run takes the same processor time twice.
    """
    counted = replace(summary, bytes=replace(summary.bytes, enrolment=0), provenance=UNSET)
    return counted, run.controller.records(), run.controller.shared_model.tobytes()


class Said:
    """Lines for people."""

    def __init__(self):
        self.lines = []

    def observe(self, event):
        if isinstance(event, Notice):
            self.lines.append(event.line)


def stop(record):
    raise Stop


def play(folder, asked, **how):
    run, summary = simulate(asked, folder, workers=0, fresh=False, **how)
    found = figures(run, summary)
    run.store.close()
    return found


@pytest.mark.parametrize("name", sooner(CASES, KEPT))
def test_stopped_wherever_it_ends_as_if_it_never_had_been(name, tmp_path, stopping):
    asked = wanted(CASES[name])
    unbroken = play(tmp_path / "a", asked)
    stops = 0
    for pieces in (15, 5, 13, 1, 12, 14):
        stopping(pieces)
        try:
            play(tmp_path / "b", asked)
        except Stop:
            stops += 1
        else:
            break
    stopping(10**9)
    assert stops > 1
    assert play(tmp_path / "b", asked) == unbroken
    assert samples(tmp_path / "b") == samples(tmp_path / "a")


def samples(folder):
    """All that the devices' stores hold, where data grow, but for pins: they have the run's own random id."""
    found = {}
    for path in sorted((folder / "devices").glob("*.sqlite")):
        with closing(sqlite3.connect(path)) as store:
            found[path.name] = [line for line in store.iterdump() if "'pin'" not in line]
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("name", OTHERS)
def test_stopped_after_each_round_it_ends_as_if_it_never_had_been(name, tmp_path):
    asked = wanted(CASES[name])
    unbroken = play(tmp_path / "a", asked)
    for _ in range(asked.run.rounds):
        with pytest.raises(Stop):
            play(tmp_path / "b", asked, on_round=stop)
    assert play(tmp_path / "b", asked, on_round=stop) == unbroken


def test_work_and_words_that_were_under_way_are_gone_on_with(tmp_path, monkeypatch):
    kinds, waited = set(), 0

    def looked_at(store, world, *others):
        nonlocal waited
        kinds.update(type(happening).__name__ for _, _, happening in world.events)
        waited += len(world.results) + len(world.tasks_made)
        write(store, world, *others)

    write = checkpoints.write_snapshot
    monkeypatch.setattr(checkpoints, "write_snapshot", looked_at)
    play(tmp_path / "a", wanted(LATE))
    assert {"TrainingDone", "ReplyArrives", "TaskArrives", "ReplyAcknowledged"} <= kinds
    assert waited


def test_a_reply_under_way_is_written_once_and_goes_when_nobody_can_ask_for_it(tmp_path, monkeypatch):
    asked, written, left = wanted(CASES["semi-asynchronous"], rounds=12), [], []
    put = RunStore.put

    def noted(store, name, data):
        if name.startswith("reply "):
            written.append(name)
            assert data
        put(store, name, data)

    def counted(record):
        with closing(RunStore.read(tmp_path / "a" / STATE)) as store:
            left.append(len(store._rows("SELECT name FROM value WHERE name LIKE 'reply %'")))

    monkeypatch.setattr(RunStore, "put", noted)
    play(tmp_path / "a", asked, on_round=counted)
    assert len(written) == len(set(written)) > 12
    assert 0 < max(left) <= 2 * BASE["fleet"]["devices"]


def test_where_a_reply_under_way_is_missing_it_says_so(tmp_path):
    asked = wanted(CASES["semi-asynchronous"])
    with pytest.raises(Stop):
        play(tmp_path, asked, on_round=stop)
    with closing(RunStore.open(tmp_path / STATE)) as store, store.step():
        (name,) = store._rows("SELECT name FROM value WHERE name LIKE 'reply %'")[0]
        store.drop(name)
    with pytest.raises(StoreError, match=f"is damaged: the entry {name} is missing"):
        play(tmp_path, asked)


def test_stopped_before_a_round_had_ended_it_begins_anew(tmp_path, stopping):
    said, asked = Said(), wanted({})
    stopping(3)
    with pytest.raises(Stop):
        play(tmp_path / "b", asked)
    stopping(10**9)
    assert play(tmp_path / "b", asked, observers=[said]) == play(tmp_path / "a", asked)
    assert "begins anew (no round had ended)" in said.lines[0]


def test_stopped_before_its_report_it_only_writes_that(tmp_path, stopping):
    said, asked = Said(), wanted({})
    finished = play(tmp_path / "b", asked)  # and nobody called `write_results`
    stopping(0)
    assert play(tmp_path / "b", asked, observers=[said]) == finished
    assert "goes on after round 5" in said.lines[0]


def test_a_finished_one_is_not_played_again_and_another_one_is_refused(tmp_path):
    asked = wanted({})
    write_results(*simulate(asked, tmp_path, workers=0, fresh=False), report=False)
    with pytest.raises(SettingError, match="holds this run, finished; --fresh simulates it again"):
        play(tmp_path, asked)
    with pytest.raises(SettingError, match=r"run\.rounds was 5 and is 4 now; set another run.name"):
        play(tmp_path, wanted({}, rounds=4))


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (
            b"\x81\xa6layout\x02",
            r"of version 2, and this release reads version 3",
        ),
        (
            b"\x81\xa6format\x04",
            r"of version 4, and this release reads version 3; --fresh",
        ),
        (b"\x81\xa6format\x03", "is damaged"),
        (b"nonsense", "is damaged"),
    ],
    ids=["of an older release", "of a newer release", "with nothing in it", "damaged"],
)
def test_a_checkpoint_of_another_version_is_refused_in_one_line(tmp_path, stored, message):
    asked = wanted({})
    with pytest.raises(Stop):
        play(tmp_path, asked, on_round=stop)
    with closing(RunStore.open(tmp_path / STATE)) as store, store.step():
        store.put("simulated", stored)
    with pytest.raises(StoreError, match=message):
        play(tmp_path, asked)


@pytest.mark.nightly
def test_killed_with_its_workers_the_same_command_goes_on(tmp_path):
    """As a user does it: whole processes, a SIGKILL whenever, the same words again."""
    (tmp_path / "run.toml").write_text(TOML.replace("rounds = 40", "rounds = 12"))

    def command(runs):
        words = ["run", "run.toml", "--runs", runs, "--workers", "2"]
        arguments = [sys.executable, "-m", "fleetune.tools.cli", *words]
        return {"args": arguments, "cwd": tmp_path, "stdout": subprocess.PIPE, "text": True}

    unbroken = subprocess.run(**command("a"), check=True)
    rounds = tmp_path / "b" / "sim" / "rounds.jsonl"
    for number in (2, 5):
        killed = subprocess.Popen(**command("b"))
        give_up = time.monotonic() + DEADLINE_S
        while killed.poll() is None and (not rounds.exists() or rounds.read_bytes().count(b"\n") < number):
            assert time.monotonic() < give_up
            time.sleep(0.01)
        killed.kill()
        killed.communicate()
    whole = subprocess.run(**command("b"), check=True)
    assert "was stopped: it goes on after round" in whole.stdout
    assert rounds.read_bytes() == (tmp_path / "a" / "sim" / "rounds.jsonl").read_bytes()
    again = subprocess.run(**command("b"), check=True)
    assert "was finished before; --fresh simulates it again" in again.stdout
    table = [line for line in unbroken.stdout.splitlines() if line.startswith("device-")]
    assert table
    assert [line for line in again.stdout.splitlines() if line.startswith("device-")] == table


def test_who_follows_reads_a_line_a_round_as_they_close(tmp_path):
    """In a pipe, where a bar would say nothing until the end; gone on with, only of what is played."""
    (tmp_path / "sim.toml").write_text(TOML.replace("rounds = 40", "rounds = 3"))
    play_it = [sys.executable, "-m", "fleetune.tools.cli", "run", "sim.toml", "--follow", "--workers", "0"]
    done = subprocess.run(
        play_it, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    first, second, third, evaluation, *_ = done.stdout.splitlines()
    for number, line in enumerate((first, second, third), start=1):
        assert line.startswith(f"round {number}/3  6/6 replied  accuracy ")
        assert re.search(r" up \d+ kB ", line)
        assert line.endswith(" left here")
    assert evaluation.startswith("final evaluation  6/6 replied  ")
    again = subprocess.run(
        play_it, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert "round 1/3" not in again.stdout
    assert "was finished before" in again.stdout
