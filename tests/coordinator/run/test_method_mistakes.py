"""A mistake in a user's method is one line that names the method's step and, where it raises, the line."""

from pathlib import Path

import pytest
from tests.helpers import mistaken_methods
from tests.helpers.hostile_world import World, stores_closed  # noqa: F401 - an autouse fixture

from fleetune import Choice, Cost, ModelAveraging, Round
from fleetune.protocols import methods
from fleetune.protocols.errors import MethodError, TrainingStopped
from fleetune.protocols.method import steps
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.methods.fedavg import FedAvg

ROUND = Round(1, ("a",))
MODULE = "tests.helpers.mistaken_methods"
FILE = Path(mistaken_methods.__file__)
READ_ONLY = "ValueError: assignment destination is read-only; a state's arrays are read-only: make new ones"


def line_of(name):
    """Where the mistake of a class stands."""
    lines = FILE.read_text().splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith(f"class {name}("))
    return next(at for at, line in enumerate(lines, 1) if at > begin and "# the mistake" in line)


MISTAKES = {
    "WorkWrites": ("work", f"failed at {FILE}:{{line}}: {READ_ONLY}"),
    "WorkWritesTask": ("work", f"failed at {FILE}:{{line}}: {READ_ONLY}"),
    "WorkRaises": ("work", f"failed at {FILE}:{{line}}: KeyError: 'own'"),
    "WorkReturnsNothing": ("work", "returns nothing (None); it must return two things: the device's next"),
    "WorkReturnsStateOnly": ("work", "returns a PersonalModel; it must return two things"),
    "WorkFloat64": ("work", "returns state.weights of float64; expected float32: .astype(np.float32)"),
    "WorkTensor": ("work", "returns state.weights, which is a Tensor; expected NumPy arrays,"),
    "UpdateFloat64": ("work", "returns update.patch.values of float64; expected float32"),
    "PlanReturnsNothing": ("plan", "returns nothing (None); it must return two things"),
    "PlanRaisesLate": ("plan", f"failed at {FILE}:{{late}}: IndexError: "),
    "InitReturnsNothing": ("init_device", "returns nothing (None); expected state as PersonalModel"),
    "AggregateWrites": ("aggregate", f"failed at {FILE}:{{line}}: {READ_ONLY}"),
    "AggregateNaN": ("aggregate", "returns NaN or infinite numbers in state.weights, though all 4 updates"),
    "AggregateReturnsNothing": ("aggregate", "returns nothing (None); expected state as SharedModel"),
    "AggregateFloat64": ("aggregate", "returns state.weights of float64; expected float32"),
    "AggregateTensor": ("aggregate", "returns state.weights, which is a Tensor"),
    "StateInt16": ("init_coordinator", "returns state.rounds of int16; expected an array of float32"),
}


@pytest.mark.parametrize(("name", "step", "said"), [(name, *words) for name, words in MISTAKES.items()])
def test_a_mistake_is_one_line_that_names_the_step(name, step, said, weights, tmp_path):
    with pytest.raises(MethodError) as problem:
        World(tmp_path, f"{MODULE}:{name}", {}, weights).play()
    line = said.format(line=line_of(name) if "{line}" in said else "", late=line_of("_Late"))
    assert str(problem.value).startswith(f"method {MODULE}:{name}: `{step}` {line}")
    assert "\n" not in str(problem.value)


def test_a_state_that_was_read_back_is_read_only_too(weights, tmp_path, monkeypatch):
    """After a restart of the coordinator as before it."""
    monkeypatch.setattr(mistaken_methods.AggregateWrites, "aggregate", ModelAveraging.aggregate)
    world = World(tmp_path, f"{MODULE}:AggregateWrites", {}, weights)
    world.join()
    while world.state.rounds_done < 1:
        world.step()
    monkeypatch.undo()
    world.restart()
    with pytest.raises(MethodError, match=r"`aggregate` failed at .*read-only"):
        world.play()


def test_states_of_a_run_are_read_only(weights, tmp_path):
    world = World(tmp_path, "fedavg", {}, weights).play()
    assert not world.controller.method_state.weights.flags.writeable
    assert not any(one.personal_model.flags.writeable for one in world.sessions.values())


def test_what_a_trainer_raises_on_purpose_passes(spec, weights):
    """It is no mistake of the method's: a device that stops, or diverges, says so itself."""

    class Stops:
        num_samples = 3

        def fit(self, *_):
            raise TrainingStopped

    method = mistaken_methods.WorkFloat64(spec)
    tasks = method.plan(method.init_coordinator(weights), ROUND, None)[1]
    with pytest.raises(TrainingStopped):
        steps.work(method, method.init_device(weights), tasks["a"], Stops(), None, None)


def test_the_methods_of_fleetune_fail_as_they_are(spec, weights):
    """A fault of ours keeps its traceback."""

    class Broken:
        num_samples = 3

        def fit(self, *_):
            raise ZeroDivisionError

    method = FedAvg(spec)
    tasks = method.plan(method.init_coordinator(weights), ROUND, None)[1]
    with pytest.raises(ZeroDivisionError):
        steps.work(method, method.init_device(weights), tasks["a"], Broken(), None, None)


class _Unreadable(Exception):
    def __str__(self):
        raise RuntimeError


def _raises(problem):
    def choices(self, report):
        raise problem

    return choices


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        (lambda self, report: None, "returns nothing (None); expected a list of Choice"),
        (lambda self, report: [0.5], "returns a list; expected a list of Choice"),
        (lambda self, report: [], "returns the ratios []; expected at least one"),
        (
            lambda self, report: [Choice(1.0, Cost(1, 1)), Choice(0.5, Cost(1, 1))],
            "returns the ratios [1.0, 0.5]",
        ),
        (_raises(KeyError("own")), f"failed at {__file__}:"),
        (_raises(SystemExit(3)), "SystemExit: 3"),
        (_raises(_Unreadable()), "_Unreadable: its message cannot be read"),
        (_raises(ValueError("x" * 100_000)), "ValueError: xxx"),
    ],
)
def test_mistaken_choices_are_one_line(choices, said, spec):
    kind = type("Chooses", (FedAvg,), {"choices": choices, "__module__": __name__})
    with pytest.raises(MethodError) as problem:
        steps.choices(kind(spec), DeviceReport("d"))
    line = str(problem.value)
    assert line.startswith(f"method {__name__}:Chooses: `choices` ")
    assert said in line
    assert len(line) < 2000


@pytest.mark.parametrize("name", methods.REGISTRY)
def test_choices_of_each_method_pass(name, spec):
    method = methods.create(name, spec, {})
    assert steps.choices(method, DeviceReport("d"))
