"""What holds for every extension, and their order."""

from dataclasses import fields, replace

import numpy as np
import pytest
from msgspec import UNSET
from tests.conftest import tiny_spec

from fleetune.edge_agent.extensions.extension import (
    Extension,
    ExtensionChain,
    RoundAttempt,
    RunStart,
    TrainingResult,
    TrainingRound,
)
from fleetune.edge_agent.extensions.order import ORDER, extensions_of
from fleetune.edge_agent.extensions.session_state import SessionState, read_state
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.edge_agent.state.deployed_files import DeployedFiles
from fleetune.protocols.method.trainer import Fit
from fleetune.protocols.methods import create
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.adoption import AdoptionSection
from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.settings.privacy import PrivacySection
from fleetune.protocols.tasks.score_gain import Gain
from fleetune.protocols.update import codec
from fleetune.protocols.wire.payloads import Enrolment, Measures
from fleetune.protocols.wire.release import Release, Version

SPEC = tiny_spec()
START = np.zeros(SPEC.size, np.float32)
TRAINED = np.full(SPEC.size, 0.5, np.float32)
METHOD = create("fedavg", SPEC, {})


class Trainer:
    """Each `fit` adds one half; a sample's loss is the distance to one."""

    spec, num_samples, num_test, num_classes_held, lower_is_better = SPEC, 10, 5, 3, False

    def in_round(self, number, optimiser_states, **_):
        if optimiser_states is not None:
            optimiser_states.put(optimiser_states.next())
        return self

    def on_all(self):
        return self

    def fit(self, weights, plan, key):
        return Fit(weights + np.float32(0.5), 0.5, 1)

    def losses(self, weights, part):
        return np.abs(weights[0] - 1) + np.linspace(0.0, 0.1, 20)

    def loss(self, weights, part="train"):
        return float(self.losses(weights, part).mean())

    def score(self, weights, part="test"):
        return 1 - abs(float(weights[0]) - 1)

    def gain(self, weights, others, part):
        return Gain(self.score(weights) - self.score(others), 0.0)


def start(folder, **changes):
    """Of a run that uses every extension."""
    training = TrainingSection(momentum=0.9, optimiser_state="device")
    figures = (0.0, 1.0, 0.2, 1.0, 1.0, 1.0)
    enrolment = Enrolment("r", 0, SPEC, {"name": "fedavg"}, training, *figures, START)
    section = AdoptionSection(enabled=True, canary=0.5)
    privacy = PrivacySection(clip=1.0, noise_multiplier=1.0, delta=1e-5)
    enrolment = replace(enrolment, **{"adoption": section, "privacy": privacy, **changes})
    files = DeployedFiles.next_to(AgentStore(folder).deployed)
    return RunStart(enrolment, Trainer(), files, num_validation=20, samples="today")


def a_round(slots, *, final_evaluation=False):
    version = Version(1, np.full(SPEC.num_parameters, 0.9, np.float32))
    release = Release(Version(0), version)
    attempt = RoundAttempt(1, 1, final_evaluation)
    return TrainingRound(attempt, Trainer(), Key.of("a round"), dict(slots), release)


def played(chain, slots, **asked):
    """A round's hooks, as a session calls them."""
    round_ = a_round(slots, **asked)
    chain.before_training(round_)
    Trainer().in_round(1, round_.optimiser_memory)
    chain.after_training(round_, TrainingResult(TRAINED, 0.5, 0.5))
    return round_


def test_the_order_is_the_one_that_adoption_needs():
    """Adoption reads the local-only model and the versions of this very round."""
    assert [one.name for one in ORDER] == [
        *("optimiser", "local_only", "releases", "best_checkpoint"),
        "privacy",
    ]


def test_a_run_that_asks_for_nothing_deploys_its_best_checkpoint_only(tmp_path):
    plain = start(tmp_path, adoption=UNSET, privacy=UNSET, training=TrainingSection())
    assert [one.name for one in extensions_of(plain).extensions] == ["best_checkpoint"]
    assert extensions_of(replace(plain, files=None)).extensions == ()


@pytest.mark.parametrize("kind", ORDER, ids=lambda kind: kind.name)
def test_each_has_a_slot_of_its_own_that_is_stored_and_read_again(kind, tmp_path):
    chain = extensions_of(start(tmp_path))
    slots = played(chain, chain.first_slots(START)).slots
    state = SessionState("r", METHOD.init_device(START), slots=slots)
    data = codec.encode(state, SPEC)
    again = read_state(data, METHOD)
    assert again.slots.keys() == slots.keys()
    assert codec.encode(again, SPEC) == data
    without = {name: one for name, one in slots.items() if name != kind.name}
    assert kind.name not in read_state(codec.encode(replace(state, slots=without), SPEC), METHOD).slots


@pytest.mark.parametrize("kind", ORDER, ids=lambda kind: kind.name)
@pytest.mark.parametrize("final_evaluation", [False, True])
def test_each_goes_on_without_a_state_and_reports_only_fields_of_measures(kind, final_evaluation, tmp_path):
    chain = ExtensionChain((kind.for_run(start(tmp_path)),))
    round_ = played(chain, {}, final_evaluation=final_evaluation)
    assert set(round_.slots) <= {kind.name}
    assert set(round_.measures) <= {one.name for one in fields(Measures)}


@pytest.mark.parametrize("kind", ORDER, ids=lambda kind: kind.name)
def test_a_round_done_again_leads_to_the_same(kind, tmp_path):
    """After a crash between its files and the session's state."""
    chain = extensions_of(start(tmp_path))
    first = chain.first_slots(START)
    once = played(chain, first)
    again = played(extensions_of(start(tmp_path)), first)
    assert again.measures == once.measures
    assert codec.encode(again.slots.get(kind.name), SPEC) == codec.encode(once.slots.get(kind.name), SPEC)


def test_an_extension_sees_the_new_states_of_those_before_it():
    class Counts(Extension[int]):
        name, state_type = "counts", int

        def after_training(self, round_, result, state):
            return (state or 0) + 1

    class Reads(Extension[int]):
        name, state_type = "reads", int

        def after_training(self, round_, result, state):
            return round_.slots["counts"]

    round_ = played(ExtensionChain((Counts(), Reads())), {"counts": 4})
    assert round_.slots == {"counts": 5, "reads": 5}
