"""A device's served model in runs with [adoption]: versions, going back, pins, power cuts, older releases."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from msgspec import UNSET
from tests.conftest import tiny_spec
from tests.helpers.power import ForgetfulDisk, PowerCut
from typer.testing import CliRunner

from fleetune.edge_agent.cli import app
from fleetune.edge_agent.extensions.adoption.decisions import read_decisions
from fleetune.edge_agent.extensions.adoption.deployed_model import DeployedModel, ModelRecord, read_deployed
from fleetune.edge_agent.extensions.extension import RunStart
from fleetune.edge_agent.extensions.order import extensions_of
from fleetune.edge_agent.run.session import Session
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.edge_agent.state.deployed_files import MOST_VERSIONS, DeployedFiles
from fleetune.edge_agent.state.state_folder import agent_files
from fleetune.protocols.errors import TrainingDiverged
from fleetune.protocols.method.choice import Budget
from fleetune.protocols.method.method import Round
from fleetune.protocols.method.trainer import Fit
from fleetune.protocols.methods import create
from fleetune.protocols.settings.adoption import AdoptionSection
from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.tasks.score_gain import Gain
from fleetune.protocols.update import codec
from fleetune.protocols.wire.payloads import Assignment, Enrolment, Reply, run_key

SPEC = tiny_spec()
NUM_HELD_OUT = 20
OLD = ModelRecord(
    "old", 7, final_evaluation=True, model=SPEC.hash, input_shape=SPEC.input_shape, num_classes=3
)
SPREAD = np.linspace(0.0, 0.02, NUM_HELD_OUT)


class Scripted:
    """Training leads to weights all of one number; a sample's loss is their distance to `best`, and a little
    more. The method trains first, then what is trained alone, then that on all samples.
    """

    spec, num_samples, num_classes_held, num_test = SPEC, 10, 3, 5

    def __init__(self):
        self.best, self.fleet, self.alone, self.trains_alone = 1.0, [], [], False
        self.fits = 0

    def fit(self, weights, plan, key):
        script = self.alone if self.trains_alone else self.fleet
        self.trains_alone, self.fits = True, self.fits + 1
        to = script.pop(0)
        if to is None:
            raise TrainingDiverged("too steep")
        weights = np.where(np.arange(SPEC.size) < SPEC.num_parameters, to, weights)
        return Fit(weights.astype(np.float32), 0.5, 1)

    def on_all(self):
        return self

    def in_round(self, number, optimiser_states, **_):
        return self

    def losses(self, weights, part):
        # how a sample's loss falls from one number to the next differs a little by sample
        return np.float64(abs(weights[0] - self.best)) * (1 + SPREAD) + SPREAD

    def loss(self, weights, part="train"):
        return float(self.losses(weights, part).mean())

    lower_is_better = False

    def score(self, weights, part="test"):
        return float((self.losses(weights, part) < 0.51).mean())

    def gain(self, weights, others, part="test"):
        return Gain(self.score(weights) - self.score(others), 0.0)


class Device:
    """A device and its folder, through restarts and runs."""

    def __init__(self, folder, **section):
        self.store, self.trainer, self.samples = AgentStore(folder), Scripted(), "today"
        self.files = DeployedFiles.next_to(self.store.deployed)
        self.section = AdoptionSection(enabled=True, **{"alone_on_all": False, **section})

    def join(self, run="a"):
        zeros, held_out = np.zeros(SPEC.size, np.float32), self.section.held_out
        enrolment = Enrolment(
            run,
            0,
            SPEC,
            {"name": "fedavg"},
            TrainingSection(),
            0.0,
            1.0,
            held_out,
            1.0,
            1.0,
            1.0,
            zeros,
            adoption=self.section,
        )
        start = RunStart(enrolment, self.trainer, self.files, NUM_HELD_OUT, self.samples)
        self.method = create("fedavg", SPEC, {})
        memory = self.store.session(run)
        self.session = Session(
            enrolment, "d", self.method, self.trainer, memory, extensions=extensions_of(start)
        )
        return self

    def work(self, number, fleet, *alone, final_evaluation=False):
        """One round, in which the fleet's model comes to `fleet` and those trained alone to `alone`."""
        state = self.method.init_coordinator(np.zeros(SPEC.size, np.float32))
        _, tasks = self.method.plan(state, Round(number, ("d",), final_evaluation), run_key(0))
        self.trainer.fleet, self.trainer.alone, self.trainer.trains_alone = [fleet], [*alone], False
        data = codec.encode(Assignment("d", number, 1, final_evaluation, tasks["d"]), SPEC)
        self.reply = self.session.reply(data, Budget())
        return codec.decode(self.reply, Reply[self.method.update_type], SPEC).measures

    @property
    def served(self):
        """The number that its weights are, whether it was trained alone, and its version."""
        found = read_deployed(self.store.deployed.read(), SPEC)
        return found and (round(float(found.weights[0]), 6), found.record.local_only, found.record.version)

    def call(self, *arguments):
        fleet, device = self.store.folder.parts[-2:]
        where = ["--fleet", fleet, "--device", device, "--state", self.store.folder.parent.parent]
        result = CliRunner().invoke(app, [str(one) for one in (*arguments, *where)])
        assert "Traceback" not in result.output
        return result.exit_code, result.output


@pytest.fixture
def device(tmp_path):
    return Device(tmp_path / "state" / "fleet" / "d").join()


def test_a_device_stays_with_what_it_trained_alone_until_the_fleet_does_better(device):
    for number, (fleet, alone, served) in enumerate(
        [
            (0.2, 0.5, (0.5, True, 1)),
            (0.4, 0.6, (0.6, True, 1)),  # alone has one version, which follows its training
            (0.8, 0.65, (0.8, False, 2)),
            (0.78, 0.7, (0.8, False, 2)),  # worse than what is in use
            (0.85, 0.75, (0.85, False, 3)),
            (0.85, 0.9, (0.9, True, 4)),
        ],
        1,
    ):
        measures = device.work(number, fleet, alone)
        assert device.served == served
        assert device.session.personal_model[0] == np.float32(fleet)  # it trains and contributes all the same
        assert measures.kept is UNSET
        assert measures.adopted == (not device.served[1])  # as it goes on, too
    assert device.files.numbers == [1, 2, 3, 4]
    whys = [one.why for one in read_decisions(device.files)]
    assert whys[2] == "better than local-only"
    assert whys[3].startswith("worse than the one in use (loss +0.0202")
    assert whys[5].startswith("back to local-only: the one in use is not better (loss +0.05")


def test_the_final_evaluation_tells_what_was_adopted_and_what_it_gained(device):
    device.work(1, 0.9, 0.3)
    measures = device.work(2, 0.95, 0.4, final_evaluation=True)
    assert (measures.adopted, measures.kept, measures.alone) == (True, 1.0, 0.0)
    assert (measures.gain, measures.gain_error) == pytest.approx((1.0, 0.0))
    assert device.served == (0.95, False, 2)
    other = Device(device.store.folder.parent / "e").join()
    other.work(1, 0.1, 0.9)
    measures = other.work(2, 0.1, 0.8, final_evaluation=True)
    assert (measures.adopted, measures.alone, measures.gain) == (False, 1.0, 0.0)
    assert other.served == (0.9, True, 1)  # what it came to in the final evaluation got worse


def test_the_model_trained_on_all_samples_is_served_in_the_place_of_the_one_that_is_judged(tmp_path):
    device = Device(tmp_path / "f" / "d", alone_on_all=True).join()
    device.work(1, 0.2, 0.5, 0.55)
    assert device.served == (0.55, True, 1)
    device.work(2, 0.54, 0.4, 0.6)  # better than the one that is judged, worse than the one that was served
    assert device.served == (0.54, False, 2)
    assert device.trainer.fits == 6
    measures = device.work(3, 0.1, 0.3, 0.7, final_evaluation=True)
    assert measures.alone == 1.0  # of the one trained on all


@pytest.mark.parametrize("every", [1, 2, 3])
def test_it_is_trained_alone_every_so_many_rounds(tmp_path, every):
    device = Device(tmp_path / "f" / "d", compare_alone=every).join()
    for number in range(1, 8):
        device.work(number, 0.1, 0.5)
        device.join()  # a restart loses nothing of it
    assert device.trainer.fits == 7 + len(range(0, 7, every))


def test_without_comparison_nothing_is_trained_alone(tmp_path):
    device = Device(tmp_path / "f" / "d", compare_alone=0).join()
    device.work(1, 0.5)
    device.work(2, 0.4)
    assert device.served == (0.5, False, 1)
    measures = device.work(3, 0.75, final_evaluation=True)
    assert (measures.adopted, measures.alone, measures.gain) == (True, UNSET, UNSET)
    assert device.trainer.fits == 3


def test_alone_may_diverge(device):
    device.work(1, 0.5, 0.4)
    device.work(2, 0.6, None)
    device.work(3, 0.7, 0.3)
    assert device.served == (0.7, False, 3)


def test_the_latest_versions_are_kept_and_the_pinned_one(device):
    for number in range(1, 12):
        device.work(number, number / 12, 0.0)
    assert len(device.files.numbers) == MOST_VERSIONS
    assert device.files.numbers[-1] == device.served[2]
    device.store.claim().close()
    (found,) = agent_files(device.store.folder)
    assert found.foreign == ()


def test_when_the_held_out_samples_change_the_best_earlier_version_is_served_again(device):
    for number, fleet in enumerate((0.5, 0.7, 0.9), 1):
        device.work(number, fleet, 0.0)
    assert device.served == (0.9, False, 3)
    device.trainer.best, device.samples = 0.55, "tomorrow"
    device.join()
    assert device.served == (0.5, False, 1)
    record = read_deployed(device.store.deployed.read()).record
    assert record.samples == "tomorrow"
    assert "version 3 is worse" in record.why
    written = device.store.deployed.path.stat().st_mtime_ns
    device.join()
    assert device.store.deployed.path.stat().st_mtime_ns == written
    device.work(4, 0.55, 0.0)
    assert device.served == (0.55, False, 4)


def test_a_pinned_version_is_served_whatever_comes(device):
    for number, fleet in enumerate((0.5, 0.7), 1):
        device.work(number, fleet, 0.0)
    code, said = device.call("pin", 1)
    assert (code, said.split("; ")[0]) == (0, "deployed until edge-agent unpin: version 1, run a, round 1")
    assert device.served == (0.5, False, 1)
    device.work(3, 0.9, 0.0)
    assert device.served == (0.5, False, 1)
    assert device.session.personal_model[0] == np.float32(0.9)
    device.trainer.best, device.samples = 0.9, "tomorrow"
    device.join().work(4, 0.9, 0.0)
    assert device.served == (0.5, False, 1)
    assert device.call("unpin")[0] == 0
    device.work(5, 0.95, 0.0)
    assert device.served[0] == 0.95


def test_rollback_serves_an_earlier_version_until_a_later_one_is_no_worse(device):
    for number, fleet in enumerate((0.5, 0.7, 0.9), 1):
        device.work(number, fleet, 0.0)
    assert device.call("rollback")[1].startswith("deployed from now on: version 2, run a, round 2;")
    assert device.served == (0.7, False, 2)
    device.work(4, 0.6, 0.0)
    assert device.served == (0.7, False, 2)
    assert device.call("rollback", 1)[0] == 0
    assert device.call("rollback") == (
        2,
        f"edge-agent: {device.files.versions}: there is no version before version 1\n",
    )
    code, said = device.call("rollback", 9)
    assert (code, said) == (
        2,
        f"edge-agent: {device.files.versions}: there is no version 9; stored are 1, 2, 3\n",
    )
    device.work(5, 0.75, 0.0)
    assert device.served == (0.75, False, 4)


def test_models_lists_versions_and_why_each_was_taken_or_left(device):
    assert device.call("models")[0] == 2
    for number, (fleet, alone) in enumerate(((0.2, 0.5), (0.7, 0.55), (0.6, 0.55)), 1):
        device.work(number, fleet, alone)
    device.call("pin", 2)
    code, said = device.call("models", "--json")
    assert code == 0
    told = json.loads(said)
    first, second = told["versions"]
    assert (first["version"], first["local_only"], first["deployed"]) == (1, True, False)
    assert (second["version"], second["deployed"], second["pinned"]) == (2, True, True)
    assert second["below_local_only"] == pytest.approx(0.15 * 1.01, abs=1e-6)
    assert [one["why"] for one in told["decisions"]][1] == "better than local-only"
    code, said = device.call("models")
    assert code == 0
    assert "pinned" in said


ROUNDS = [(0.2, 0.5), (0.8, 0.55), (0.9, 0.65), (0.6, 0.95)]


def test_a_power_cut_anywhere_leaves_what_was_served_or_what_is_and_ends_the_same(tmp_path):
    """The power goes before or after each of the operations of a run of rounds, once; then it goes on."""
    whole = play(tmp_path / "whole", None)
    cuts = 0
    for at in itertools.count(0, 2.5):
        found = play(tmp_path / f"cut-{at}", at)
        if found is None:
            break
        cuts += 1
        assert found == whole
    assert cuts > 20


def play(folder, cut_at):
    """What is served, the session and the last reply at the end; None: the power never went."""
    folder.mkdir()
    power = ForgetfulDisk(folder, 0)
    power.cut_at, seen, was_cut = cut_at, [], False
    device, number = Device(folder / "d"), 1
    while number <= len(ROUNDS) + 1:
        fleet, alone = ROUNDS[min(number, len(ROUNDS)) - 1]
        try:
            with power.in_place():
                device.join().work(number, fleet, alone, final_evaluation=number > len(ROUNDS))
        except PowerCut:
            was_cut = True
            power.cut()
            if device.store.deployed.path.exists():
                assert read_deployed(device.store.deployed.read(), SPEC) is not None
            continue
        seen.append(device.reply)
        number += 1
    if cut_at is not None and not was_cut:
        return None
    return device.served, device.store.session("a").read(), seen


def test_what_an_older_release_served_becomes_the_first_version(device):
    old = replace(OLD, held_out=0.2)
    weights = np.full(SPEC.size, 0.8, np.float32)
    device.store.deployed.write(codec.encode(DeployedModel(replace(old, validation_loss=0.2), weights), SPEC))
    device.join()
    assert device.served == (0.8, False, 1)
    device.work(1, 0.5, 0.3)
    assert device.served == (0.8, False, 1)
    device.work(2, 0.9, 0.3)
    assert device.served == (0.9, False, 2)
    assert device.call("rollback")[0] == 0
    assert device.served == (0.8, False, 1)


def test_what_was_trained_on_samples_that_are_held_out_today_stays_to_the_final_evaluation_at_most(device):
    weights = np.full(SPEC.size, 0.9, np.float32)
    device.store.deployed.write(codec.encode(DeployedModel(OLD, weights), SPEC))
    device.join().work(1, 0.8, 0.3)
    assert device.served == (0.9, False, 1)
    device.work(2, 0.8, 0.4, final_evaluation=True)
    assert device.served == (0.8, False, 2)
