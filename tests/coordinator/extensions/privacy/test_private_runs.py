"""Whole runs with [privacy]: what counts, what is charged, when they end, and what they refuse."""

import json
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from msgspec import UNSET
from tests.helpers.errors import raises
from tests.helpers.every_method import SETTINGS
from tests.helpers.hostile_world import DEVICES, SPEC, World, stores_closed  # noqa: F401 - a fixture
from tests.helpers.nightly import of_methods

from fleetune.coordinator.extensions.privacy.accountant import epsilon_of, most_tasks
from fleetune.coordinator.extensions.privacy.checks import check_privacy, leak_of
from fleetune.coordinator.extensions.privacy.noisy_mean import NoisyMean
from fleetune.coordinator.extensions.privacy.private_steps import PrivateSteps
from fleetune.coordinator.run import run_parts
from fleetune.coordinator.run.open_or_resume import open_run
from fleetune.coordinator.store.device_rows import read_engine
from fleetune.coordinator.store.run_store import RunStore
from fleetune.edge_agent.extensions import privacy as device_privacy
from fleetune.protocols.errors import PacketForeign, SettingError
from fleetune.protocols.method.averaging import ModelAveraging
from fleetune.protocols.method.choice import Budget
from fleetune.protocols.methods import REGISTRY, create
from fleetune.protocols.settings.run_toml import parse_run
from fleetune.protocols.update import encodings
from fleetune.protocols.update.patch import Patch, patches_in
from fleetune.protocols.update.private_step import step_norm, task_values
from fleetune.protocols.update.selection import Everything

CLIP = 0.25
PRIVATE = {"clip": CLIP, "noise_multiplier": 1.0, "delta": 1e-5}
PARAMETERS = slice(0, SPEC.num_parameters)
ALLOWED = [(name, own) for name, own in SETTINGS if leak_of(type(create(name, SPEC, own))) is None]
ALLOWED = [one for one in ALLOWED if not create(one[0], SPEC, one[1]).needs_validation]
REFUSED = [name for name in REGISTRY if leak_of(type(create(name, SPEC, {}))) is not None]


@pytest.fixture
def weights():
    return np.linspace(-1, 1, SPEC.size, dtype=np.float32)


@pytest.fixture
def no_noise(monkeypatch):
    """Shows what the noise would hide."""
    monkeypatch.setattr(run_parts, "secret_normal", lambda count, first: np.zeros(count))
    monkeypatch.setattr(device_privacy, "secret_normal", lambda count, first: np.zeros(count))


def steps(world, before):
    """Each device's step in the round that has just closed, from its personal model (FedAvg)."""
    return {
        name: session.personal_model[PARAMETERS].astype(np.float64) - before[PARAMETERS]
        for name, session in world.sessions.items()
    }


def one_round(folder, weights, privacy, **more):
    world = World(folder, "fedavg", {}, weights, privacy=privacy, rounds=1, **more)
    return world.play()


def test_the_mean_of_a_round_is_that_of_clipped_steps_that_count_alike(weights, tmp_path, no_noise):
    world = one_round(tmp_path, weights, PRIVATE)
    trained = steps(world, weights)
    norms = {name: np.linalg.norm(step) for name, step in trained.items()}
    assert min(norms.values()) > CLIP, "the test needs steps that are clipped"
    due = np.mean([step * CLIP / norms[name] for name, step in trained.items()], axis=0)
    assert np.allclose((world.shared() - weights)[PARAMETERS], due, atol=1e-6)


@pytest.mark.parametrize("samples", [0, 10])
def test_a_device_that_claims_and_sends_anything_moves_the_sum_by_the_clip_at_most(
    samples, weights, tmp_path, no_noise
):
    def forge(reply):
        patch = replace(reply.update.patch, values=reply.update.patch.values * np.float32(1e30))
        return replace(reply, update=replace(reply.update, patch=patch, num_samples=samples))

    honest = one_round(tmp_path / "honest", weights, PRIVATE).shared()
    forged = one_round(tmp_path / "forged", weights, PRIVATE, forge=forge).shared()
    moved = np.linalg.norm((forged - honest)[PARAMETERS].astype(np.float64)) * len(DEVICES)
    assert 0 < moved <= 2 * CLIP * 1.001


def test_a_device_that_sends_other_entries_than_it_was_asked_for_counts_as_no_step(
    weights, tmp_path, no_noise
):
    def forge(reply):
        values = np.full(SPEC.num_parameters, 9, np.float32)
        return replace(reply, update=replace(reply.update, patch=Patch(Everything(), values)))

    options = {"personal_layers": 1}
    world = World(tmp_path, "fedper", options, weights, privacy=PRIVATE, rounds=1, forge=forge).play()
    moved = (world.shared() - weights).astype(np.float64)
    assert 0 < np.linalg.norm(moved) <= CLIP * 3 / 4 * 1.001
    assert set(world.closed[0].devices) == set(DEVICES)


def test_the_noise_of_a_fleet_differs_in_every_run_and_has_the_size_that_epsilon_assumes(weights, tmp_path):
    noise = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run_parts, "secret_normal", lambda count, first: np.zeros(count))
        quiet = one_round(tmp_path / "quiet", weights, PRIVATE).shared()
    for number in range(25):
        world = one_round(tmp_path / str(number), weights, PRIVATE)
        noise.append((world.shared() - quiet)[PARAMETERS] * len(DEVICES) / CLIP)
        world.run.store.close()
    drawn = np.concatenate(noise)
    assert len({one.tobytes() for one in noise}) == len(noise)
    # five deviations of the estimate: an honest run fails once in 1.7 million
    assert abs(drawn.std() - 1) < 5 / np.sqrt(2 * drawn.size)
    assert abs(drawn.mean()) < 5 / np.sqrt(drawn.size)


@pytest.mark.parametrize("noise", ["central", "local"])
@pytest.mark.parametrize(("name", "own"), of_methods(ALLOWED))
def test_every_allowed_method_sends_one_bounded_step_and_combines_once(
    name, own, noise, weights, tmp_path, monkeypatch, no_noise
):
    combined, norms = [], []
    weigh, combine = PrivateSteps.weigh, NoisyMean.__call__

    def weighed(self, replies, round_):
        for reply in weigh(self, replies, round_):
            (task,), (patch,) = patches_in(round_.tasks[reply.device]), patches_in(reply.update)
            norms.append(step_norm(patch.values, task_values(task, patch, SPEC)))
            assert reply.update.num_samples == 1
            yield reply

    def noisy(self, spec):
        combined.append(spec)
        return combine(self, spec)

    monkeypatch.setattr(PrivateSteps, "weigh", weighed)
    monkeypatch.setattr(NoisyMean, "__call__", noisy)
    privacy = {**PRIVATE, "noise": noise}
    world = World(tmp_path, name, own, weights, privacy=privacy, rounds=2).play()
    assert len(norms) == 2 * len(DEVICES)
    # a local step is rounded to float32 after its noise, so it may be longer by the rounding
    assert max(norms) <= CLIP * (1 if noise == "central" else 1.00001)
    assert len(combined) == (2 if noise == "central" else 0)
    section = world.settings.privacy
    assert [record.epsilon for record in world.closed] == [epsilon_of(section, tasks) for tasks in (1, 2)]


@pytest.mark.parametrize("name", REFUSED)
def test_every_other_method_is_refused_by_name_before_anything_is_written(name, weights, tmp_path):
    with raises(SettingError, "[privacy]", f"method {name}:"):
        World(tmp_path / "run", name, {}, weights, privacy=PRIVATE)
    assert not (tmp_path / "run" / "state.sqlite").exists()


@pytest.mark.parametrize("name", REGISTRY)
def test_every_method_states_itself_what_it_reveals(name):
    assert "leak" in vars(type(create(name, SPEC, {})))


@pytest.mark.parametrize("name", encodings.REGISTRY)
def test_every_encoding_states_itself_what_it_reveals(name):
    assert "leak" in vars(type(encodings.find(name)))


def test_a_users_method_must_state_it_too():
    class Own(ModelAveraging):
        pass

    assert leak_of(Own) == "Own does not state what it reveals: set `leak` in the class itself"


def refused(privacy=PRIVATE, **sections):
    content = {
        "run": {"name": "r", "rounds": 3},
        "model": {"name": "mlp"},
        "method": {"name": "fedavg"},
        "fleet": {"devices": 4},
        "privacy": privacy,
    }
    settings = parse_run(content | sections)
    check_privacy(settings, create("fedavg", SPEC, {}))


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"encoding": {"up": "sparse"}}, "encoding.up = sparse"),
        ({"encoding": {"up": {"name": "peaks", "bits": 0.01}}}, "encoding.up = peaks"),
        ({"round": {"prefer": "oort"}}, 'round.prefer = "oort"'),
        ({"round": {"prefer": "tiers"}}, 'round.prefer = "tiers"'),
        ({"round": {"mode": "buffer", "buffer": 2}}, 'round.mode = "buffer"'),
        ({"round": {"robust": "clip"}}, 'round.robust = "clip" with central noise'),
        ({"objective": {"minimise": "bytes"}}, "[objective]"),
        ({"adoption": {"enabled": True, "canary": 0.2}}, "adoption.canary"),
        ({"run": {"name": "r", "rounds": "open"}}, "run.rounds"),
        ({"privacy": {**PRIVATE, "max_epsilon": 0.1}}, "privacy.max_epsilon = 0.1"),
    ],
)
def test_what_cannot_be_protected_is_refused_in_one_line(sections, named):
    with raises(SettingError, named):
        refused(**sections)


def test_local_noise_goes_with_a_robust_rule_because_each_update_is_noised_already(weights, tmp_path):
    privacy = {**PRIVATE, "noise": "local"}
    world = World(tmp_path, "fedavg", {}, weights, privacy=privacy, rounds=2, robust="median").play()
    assert len(world.closed) == 2


def test_no_figure_of_a_step_is_recorded_if_only_the_noised_sum_may_be_known(weights, tmp_path):
    rows = one_round(tmp_path / "central", weights, PRIVATE).closed[0].devices.values()
    assert all(row.step is None for row in rows)
    local = one_round(tmp_path / "local", weights, {**PRIVATE, "noise": "local"})
    assert all(row.step is not None for row in local.closed[0].devices.values())


def test_a_method_whose_devices_leave_by_their_loss_is_refused():
    settings = parse_run(
        {
            "run": {"name": "r", "rounds": 3},
            "model": {"name": "mlp"},
            "method": {"name": "fedspu", "early_stopping": True},
            "fleet": {"devices": 4},
            "privacy": PRIVATE,
        }
    )
    with raises(SettingError, "held-out samples", remedy="early_stopping"):
        check_privacy(settings, create("fedspu", SPEC, {"early_stopping": True}))


def limited(tasks, **more):
    """[privacy] whose max_epsilon allows this number of tasks."""
    section = parse_run(
        {
            "run": {"name": "r", "rounds": 1},
            "model": {"name": "mlp"},
            "method": {"name": "fedavg"},
            "fleet": {"devices": 4},
            "privacy": PRIVATE,
        }
    ).privacy
    limit = (epsilon_of(section, tasks) + epsilon_of(section, tasks + 1)) / 2
    return {**PRIVATE, "max_epsilon": limit, **more}


def test_a_run_ends_before_max_epsilon_is_exceeded_and_says_so(weights, tmp_path):
    privacy = limited(3)
    world = World(tmp_path, "fedavg", {}, weights, privacy=privacy, rounds=50).play()
    assert world.finished == f"a further round would exceed privacy.max_epsilon = {privacy['max_epsilon']:g}"
    assert len(world.closed) == 3
    assert world.closed[-1].epsilon <= privacy["max_epsilon"]
    assert {member.tasks for member in world.state.members.values()} == {3}


def test_with_few_participants_a_round_each_device_has_its_own_budget(weights, tmp_path):
    world = World(tmp_path, "fedavg", {}, weights, privacy=limited(3), rounds=50, participants=2).play()
    tasks = [member.tasks for member in world.state.members.values()]
    assert max(tasks) == 3
    assert sum(tasks) == 2 * len(world.closed)
    assert len(world.closed) >= 4, "a device at its limit does not end the run for all others"
    assert sum(one < 3 for one in tasks) < 2, "the run ends only if too few devices can still be asked"


def test_attempts_without_an_answer_are_charged_too(weights, tmp_path):
    world = World(tmp_path, "fedavg", {}, weights, privacy=limited(3), rounds=50, quorum=4)
    world.join()
    for _ in range(2):
        world.tasks.clear()  # nobody answers until the deadline
        while not world.tasks:
            world.step()
    while world.finished is None:
        world.step()
    assert len(world.closed) == 1
    assert {member.tasks for member in world.state.members.values()} == {3}


def test_a_restart_in_a_round_neither_forgets_nor_charges_twice(weights, tmp_path):
    world = World(tmp_path, "fedavg", {}, weights, privacy=limited(3), rounds=50)
    world.join()
    world.restart()
    assert {member.tasks for member in world.state.members.values()} == {1}
    while world.finished is None:
        world.step()
        if world.tasks:
            world.restart()
    assert len(world.closed) == 3
    assert {member.tasks for member in world.state.members.values()} == {3}


KILLED = """
    import os, signal, sys
    from pathlib import Path
    import numpy as np
    from tests.helpers import hostile_world
    from tests.helpers.hostile_world import SPEC, World
    hostile_world.open_run.__kwdefaults__["durable"] = True
    world = World(Path(sys.argv[1]), "fedavg", {}, np.zeros(SPEC.size, np.float32), rounds=9, privacy=dict(
        clip=0.25, noise_multiplier=1.0, delta=1e-5, noise=sys.argv[2]))
    take = world.take
    def kill(outcomes):
        if any(type(one).__name__ == "OutgoingTask" for one in outcomes):
            os.kill(os.getpid(), signal.SIGKILL)  # before the first byte of a task is sent
        take(outcomes)
    world.take = kill
    world.join()
"""


@pytest.mark.parametrize("noise", ["central", "local"])
def test_after_kill_9_before_the_first_task_leaves_the_budget_is_spent(noise, tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path), noise]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    store = RunStore.read(next(path for path in tmp_path.iterdir() if path.name.startswith("state")))
    state = read_engine(store)
    store.close()
    assert {name: member.tasks for name, member in state.members.items()} == dict.fromkeys(DEVICES, 1)


def test_a_setting_that_privacy_refuses_cannot_come_in_when_a_run_is_continued(weights, tmp_path):
    world = World(tmp_path, "fedavg", {}, weights, privacy=PRIVATE)
    world.join()
    world.run.store.close()
    content = json.loads(msgspec.json.encode(world.settings))
    content["round"]["prefer"] = "oort"
    with raises(SettingError, 'round.prefer = "oort"'):
        open_run(parse_run(content), tmp_path, durable=False)
    content["round"]["prefer"], content["privacy"]["noise_multiplier"] = "any", 0.1
    with raises(SettingError, "privacy.noise_multiplier"):
        open_run(parse_run(content), tmp_path, durable=False)


def test_a_device_counts_its_own_updates_and_stops_at_the_runs_limit(weights, tmp_path):
    """The coordinator may have lost its store, so the device does not rely on it."""
    world = World(tmp_path, "fedavg", {}, weights, privacy=limited(3), rounds=50)
    assert world.enrolment.most_tasks == most_tasks(world.settings.privacy) == 3
    world.play()
    again = World(tmp_path / "again", "fedavg", {}, weights, privacy=limited(9), rounds=50)
    again.sessions = world.sessions
    again.join()
    _, payload = again.tasks["a"]
    with raises(PacketForeign, "has sent 3 updates", "privacy.max_epsilon"):
        again.sessions["a"].reply(payload, Budget())


@pytest.mark.parametrize("scores", [False, True])
def test_losses_and_scores_leave_a_device_only_if_the_run_asks_for_them(scores, weights, tmp_path):
    world = World(tmp_path, "fedavg", {}, weights, privacy={**PRIVATE, "scores": scores}, rounds=1).play()
    measures = world.closed[0].devices["a"].measures
    known = [measures.train_loss, measures.before, measures.after]
    assert all(one is not None for one in known) == scores
    assert measures.scores is UNSET
