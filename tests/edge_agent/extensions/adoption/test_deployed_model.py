"""Which model a device serves: through rounds, final evaluations, restarts with other data, crashes and
runs.
"""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET
from tests.conftest import tiny_spec

from fleetune.edge_agent.extensions.adoption.adoption import Adoption
from fleetune.edge_agent.extensions.adoption.best_checkpoint import is_better
from fleetune.edge_agent.extensions.adoption.deployed_model import ModelRecord, read_deployed
from fleetune.edge_agent.extensions.extension import RunStart
from fleetune.edge_agent.extensions.order import extensions_of
from fleetune.edge_agent.run.session import Session
from fleetune.edge_agent.state.deployed_files import DeployedFiles
from fleetune.protocols.errors import StoreError
from fleetune.protocols.method.choice import Budget
from fleetune.protocols.method.method import Round
from fleetune.protocols.method.trainer import Fit
from fleetune.protocols.methods import create
from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.update import codec
from fleetune.protocols.wire.payloads import Assignment, Enrolment, Reply, run_key

SPEC = tiny_spec()
ONE = ModelRecord("a", 1, final_evaluation=False, model="m", input_shape=(2,), num_classes=3, held_out=0.2)
JUDGED = replace(ONE, validation_loss=0.5, training_loss=0.5)


def other(**changes):
    return replace(JUDGED, run="b", **changes)


@pytest.mark.parametrize(
    ("candidate", "served", "better"),
    [
        (JUDGED, None, True),
        (replace(JUDGED, trained=False), None, False),
        (replace(JUDGED, validation_loss=0.4), JUDGED, True),
        (replace(JUDGED, validation_loss=0.6), JUDGED, False),
        (replace(JUDGED, validation_loss=0.4, trained=False), JUDGED, True),
        (JUDGED, JUDGED, True),  # of equals the newer
        (other(validation_loss=0.6, final_evaluation=True), JUDGED, False),
        (other(validation_loss=0.4), JUDGED, True),
        (other(validation_loss=0.6, training_loss=0.4, held_out=0.3), JUDGED, True),  # it was trained on them
        (other(validation_loss=0.4, training_loss=0.6, held_out=0.3), JUDGED, False),
        (other(validation_loss=0.6, num_classes=4), JUDGED, True),  # another question
        (ONE, ONE, True),  # nothing to judge by: the newest
        (replace(ONE, training_loss=0.9), replace(ONE, training_loss=0.1), True),
        (replace(ONE, trained=False), ONE, False),
        (replace(ONE, run="b", training_loss=0.6), replace(ONE, training_loss=0.5), False),
        (replace(ONE, run="b", training_loss=0.4), replace(ONE, training_loss=0.5), True),
        (
            replace(ONE, run="b", training_loss=0.6, final_evaluation=True),
            replace(ONE, training_loss=0.5),
            False,
        ),
        (
            replace(ONE, run="b", training_loss=0.6, final_evaluation=True, model="n"),
            replace(ONE, training_loss=0.5),
            True,
        ),
        (replace(ONE, run="b"), replace(ONE, training_loss=0.5), True),
    ],
)
def test_the_rule(candidate, served, better):
    assert is_better(candidate, served) is better


@given(st.lists(st.floats(0, 10), min_size=1, max_size=20))
def test_with_validation_samples_the_lowest_loss_of_all_is_served(losses):
    served = None
    for number, loss in enumerate(losses):
        candidate = replace(JUDGED, run=f"run-{number // 3}", round=number, validation_loss=loss)
        served = candidate if is_better(candidate, served) else served
    assert served.validation_loss == min(losses)
    assert served.round == max(at for at, loss in enumerate(losses) if loss == min(losses))


class Box:
    """A file of the device; `full`: it cannot be written."""

    plain = False

    def __init__(self):
        self.data, self.full, self.writes = None, False, 0

    def read(self):
        return self.data

    def write(self, data):
        if self.full:
            raise StoreError("the disk is full")
        self.data, self.writes = data, self.writes + 1


class Scripted:
    """Training leads to weights all of one number; losses are distances to `best`."""

    spec, num_samples, num_classes_held, num_test, lower_is_better = SPEC, 10, 3, 5, False

    def __init__(self, best=1.0):
        self.best, self.leads_to = best, []

    def in_round(self, number, optimiser_states, **_):
        return self

    def fit(self, weights, plan, key):
        to = np.where(np.arange(SPEC.size) < SPEC.num_parameters, self.leads_to.pop(0), weights)
        return Fit(to.astype(np.float32), float(abs(to[0] - self.best)), 1)

    def loss(self, weights, part="train"):
        return float(abs(weights[0] - self.best))

    def accuracy(self, weights, part="test"):
        return max(0.0, 1 - self.loss(weights))

    def score(self, weights, part="test"):
        return self.accuracy(weights, part)


class ClientState:
    """A device and the disk it keeps through restarts and runs."""

    def __init__(self, num_validation=4, *, session_keeps_newest=False):
        self.num_validation, self.trainer, self.samples = num_validation, Scripted(), "today"
        self.session_keeps_newest = session_keeps_newest
        self.served, self.sessions = Box(), {}

    def join(self, run="a", start=0.0, own=lambda: None):
        self.enrolment = Enrolment(
            run,
            0,
            SPEC,
            {"name": "fedavg"},
            TrainingSection(),
            0.0,
            1.0,
            0.2 if self.num_validation else 0.0,
            1.0,
            1.0,
            1.0,
            np.full(SPEC.size, start, np.float32),
        )
        files = DeployedFiles(self.served, None, None, None)
        start = RunStart(
            self.enrolment, self.trainer, files, self.num_validation, self.samples, self.session_keeps_newest
        )
        self.method = create("fedavg", SPEC, {})
        memory = self.sessions.setdefault(run, Box())
        self.session = Session(
            self.enrolment, "d", self.method, self.trainer, memory, extensions=extensions_of(start), own=own
        )
        return self

    def work(self, number, leads_to, *, shared=0.0, final_evaluation=False):
        """One round from a shared model; the measures of the reply."""
        state = self.method.init_coordinator(np.full(SPEC.size, shared, np.float32))
        _, tasks = self.method.plan(state, Round(number, ("d",), final_evaluation), run_key(0))
        self.trainer.leads_to = [leads_to]
        data = codec.encode(Assignment("d", number, 1, final_evaluation, tasks["d"]), SPEC)
        reply = codec.decode(self.session.reply(data, Budget()), Reply[self.method.update_type], SPEC)
        return reply.measures

    @property
    def kept(self):
        """Accuracy of the best of this run."""
        return self.session._state.slots[Adoption.name].accuracy

    @property
    def now(self):
        """The run, the round and the number of what is served."""
        found = read_deployed(self.served.read(), SPEC)
        return found and (found.record.run, found.record.round, float(found.weights[0]))


def test_a_worse_round_leaves_what_is_served():
    device = ClientState().join()
    assert device.now is None
    for number, (to, kept) in enumerate([(0.5, 0.5), (0.75, 0.75), (0.25, 0.75), (0.875, 0.875)], 1):
        assert device.work(number, to).kept is UNSET  # the final evaluation tells, and costs no round a byte
        assert device.kept == kept
    assert device.now == ("a", 4, 0.875)
    assert device.session.personal_model[0] == 0.875
    device.work(5, 0.0)
    assert device.now == ("a", 4, 0.875)
    assert device.session.personal_model[0] == 0  # the method's own goes on as its paper says


def test_without_validation_samples_the_newest_is_served():
    device = ClientState(num_validation=0).join()
    for number, to in ((1, 0.5), (2, 0.25)):
        device.work(number, to)
        assert device.kept == to
    assert device.now == ("a", 2, 0.25)


def test_what_the_session_keeps_is_written_once_unless_it_is_another_model():
    device = ClientState(0, session_keeps_newest=True)
    for number, to in ((1, 0.5), (2, 0.25)):
        device.join().work(number, to)
        assert (device.kept, device.now) == (to, None)
        assert device.session.personal_model[0] == to
    device.join()
    assert device.kept == 0.25
    assert device.work(3, 0.75, final_evaluation=True).kept == 0.75
    assert device.now == ("a", 3, 0.75)  # the session's is still the one before
    device.join().work(4, 0.125)
    assert device.now == ("a", 4, 0.125)  # a file that is there is the newest


def test_where_validation_samples_may_prefer_an_older_model_it_is_written():
    device = ClientState(4, session_keeps_newest=True).join()
    device.work(1, 0.75)
    device.work(2, 0.25)
    assert device.now == ("a", 1, 0.75)


@pytest.mark.parametrize(
    ("num_validation", "shared", "leads_to", "wanted"),
    [
        (4, 0.0, 0.9375, 0.9375),  # after local training
        (4, 0.9375, 0.0, 0.9375),  # before it
        (4, 0.25, 0.5, 0.75),  # neither
        (0, 0.9375, 0.5, 0.5),  # nothing to judge by: the newest that was trained
    ],
)
def test_the_closing_final_evaluation_is_not_thrown_away(num_validation, shared, leads_to, wanted):
    device = ClientState(num_validation).join()
    device.work(1, 0.75)
    measures = device.work(2, leads_to, shared=shared, final_evaluation=True)
    assert device.now[2] == wanted
    assert measures.kept == wanted
    assert measures.personal == 0.75


@pytest.mark.parametrize(
    ("num_validation", "shared", "leads_to", "wanted"),
    [
        (4, 0.9375, 0.0, "deployed from now on: run a, final evaluation, before local training;"),
        (0, 0.9375, 0.5, "deployed from now on: run a, final evaluation, after local training;"),
        (
            4,
            0.25,
            0.5,
            "model of run a, final evaluation, after local training; .*: not deployed, that of",
        ),
    ],
)
def test_one_line_says_which_model_of_the_final_evaluation_is_deployed(
    num_validation, shared, leads_to, wanted, caplog
):
    device = ClientState(num_validation).join()
    device.work(1, 0.75)
    caplog.clear()
    with caplog.at_level("INFO"):
        device.work(2, leads_to, shared=shared, final_evaluation=True)
    said = [line for line in caplog.messages if "deployed" in line]
    assert len(said) == 1, said
    assert re.match(wanted, said[0]), said


@pytest.mark.parametrize("num_validation", [4, 0])
def test_the_next_run_changes_nothing_until_it_has_something_better(num_validation):
    device = ClientState(num_validation).join()
    device.work(1, 0.75)
    device.join("b", start=0.0)
    assert device.now == ("a", 1, 0.75)
    device.work(1, 0.25)
    assert device.kept == 0.25  # the new run's figures are its own
    assert device.now == ("a", 1, 0.75)
    device.join("b")  # a restart
    device.work(2, 0.5)
    assert device.kept == 0.5
    assert device.now == ("a", 1, 0.75)
    device.work(3, 0.875)
    assert device.now == ("b", 3, 0.875)


def test_a_restart_judges_what_is_served_by_the_samples_of_today():
    device = ClientState().join()
    device.work(1, 0.75)
    device.trainer.best, device.samples = 0.0, "tomorrow"
    device.join()
    assert read_deployed(device.served.read()).record.validation_loss == 0.75
    device.work(2, 0.5)
    assert device.now == ("a", 2, 0.5)
    writes = device.served.writes
    device.join()
    assert device.served.writes == writes  # the same samples: nothing to judge


def test_without_validation_samples_runs_are_compared_on_the_training_samples_of_today():
    device = ClientState(num_validation=0).join()
    device.work(1, 0.75)
    device.join("b")
    device.work(1, 0.5, final_evaluation=True)
    assert device.now == ("a", 1, 0.75)  # not even the final evaluation of a worse run replaces it
    device.trainer.best, device.samples = 0.0, "tomorrow"  # now it is the better one
    device.join("c")
    device.work(1, 0.5)
    assert device.now == ("c", 1, 0.5)


@pytest.mark.parametrize("leads_to", [0.875, 0.5])
def test_a_crash_between_the_two_writes_changes_nothing(leads_to):
    wanted, device = ClientState().join(), ClientState().join()
    for one in (wanted, device):
        one.work(1, 0.75)
    device.sessions["a"].full = True
    with pytest.raises(StoreError):
        device.work(2, leads_to)
    device.sessions["a"].full = False
    device.join()
    assert device.work(2, leads_to) == wanted.work(2, leads_to)
    assert device.now == wanted.now
    assert device.sessions["a"].data == wanted.sessions["a"].data


def test_a_model_that_cannot_be_written_stays_the_one_before():
    device = ClientState().join()
    device.work(1, 0.75)
    device.served.full = True
    with pytest.raises(StoreError):
        device.work(2, 0.875)
    assert device.now == ("a", 1, 0.75)
    device.work(3, 0.5)  # worse: nothing to write


def test_a_model_that_is_not_finite_on_the_validation_samples_is_never_served():
    device = ClientState().join()
    device.trainer.loss = lambda *_: float("nan")
    device.work(1, 0.75)
    assert device.now is None


def test_a_device_that_continues_begins_with_its_own_model():
    device = ClientState().join()
    device.work(1, 0.75)
    device.join("b", own=lambda: np.full(SPEC.size, 0.75, np.float32))
    assert device.session.personal_model[0] == 0.75
    device.work(1, 0.5)
    device.join("b", own=lambda: pytest.fail("it has begun"))
    assert device.session.personal_model[0] == 0.5
