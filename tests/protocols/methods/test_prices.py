"""What the five papers' methods ask of a device at each ratio: less at lower ones, and what is truly sent."""

from functools import cache, partial
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from tests.conftest import PullToTarget, tiny_spec

from fleetune.edge_agent.budget.cost_forecast import Capability, ModelSize, demand, predict
from fleetune.edge_agent.budget.cost_history import CostHistory
from fleetune.edge_agent.training.descent import OptimiserFootprint
from fleetune.edge_agent.training.trainers import KINDS
from fleetune.protocols.bundle.shipped import shipped_bundle
from fleetune.protocols.method.choice import LOCAL_WORKS, Budget, Choice, Cost, DeviceReport
from fleetune.protocols.method.critical_parameters import critical_entries
from fleetune.protocols.method.method import Method, Round
from fleetune.protocols.methods import fedcac, from_section, with_defaults_of_run
from fleetune.protocols.methods.cd2_pfed import shared_entries
from fleetune.protocols.methods.lotteryfl import prune, share_left
from fleetune.protocols.model.spec import FlatArray, MaskArray, ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.update import codec
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Entries, Everything

METHODS = ("fedspu", "srp-pfed", "kapc", "kapc-bls", "fedpurin", "dc-pfl")
ROUNDS = 5
OVERHEAD = 400  # bytes of names, shapes and checksums, which prices take for less
ABOVE, BELOW = 1.1, 3  # how far what is sent may lie above its price, and below it at its most
MASKED = ("fedcac", "lotteryfl", "cd2-pfed")  # send masks, too, and know one ratio
SAVING = ("kapc-bls",)  # leaves out of the layers priced those that differ much: as many as it finds


@cache
def lenet5() -> ModelSpec:
    bundle = shipped_bundle("lenet5", (3, 32, 32), 10)
    assert bundle is not None
    return bundle.spec


SPECS = {"tiny": tiny_spec, "lenet5": lenet5}
each_method = pytest.mark.parametrize("name", METHODS)
each_spec = pytest.mark.parametrize("spec", SPECS)


def method_of(name: str, spec: ModelSpec) -> Method[Any, Any, Any, Any]:
    """As a run that begins now has it."""
    return from_section(with_defaults_of_run({"name": name}, ROUNDS), spec)


def choices_of(name: str, spec: ModelSpec) -> list[Choice]:
    return list(method_of(name, spec).choices(DeviceReport("d", num_samples=10)))


def rising(figures: list[float]) -> bool:
    return all(one <= after for one, after in pairwise(figures))


@pytest.mark.parametrize(
    "optimiser", [OptimiserFootprint(1), OptimiserFootprint(2), OptimiserFootprint(2, 3)]
)
@each_spec
@each_method
def test_a_lower_ratio_never_asks_for_more(name, spec, optimiser):
    choices = choices_of(name, SPECS[spec]())
    size = ModelSize(4 * SPECS[spec]().size, 35_312.0)
    able = Capability(10, 1, 16, size, base_bytes=83_000_000, optimiser=optimiser)
    for figure in ("bytes_down", "bytes_up", "memory_bytes", "trainable_share"):
        assert rising([getattr(choice.cost, figure) for choice in choices]), figure
    for trainer in KINDS:
        forecast = partial(predict, capability=Capability(**{**vars(able), "trainer": trainer}))
        found = [forecast(choice, cost_history=CostHistory()) for choice in choices]
        assert rising([one.memory_bytes for one in found])
    assert rising([demand(choice, able).samples for choice in choices])


@each_method
def test_the_lowest_ratio_takes_far_less_than_a_whole_model_down_and_up(name):
    lowest, whole = choices_of(name, lenet5())[0].cost, codec.estimate_bytes(lenet5().num_parameters)
    assert lowest.bytes_down < 0.3 * whole
    assert lowest.bytes_up < 0.3 * whole


@each_method
def test_what_a_round_is_worth_is_a_share_and_more_training_is_worth_more(name):
    method, ratios = method_of(name, lenet5()), [choice.ratio for choice in choices_of(name, lenet5())]
    for ratio in ratios:
        worths = [method.utility(Budget(ratio, local_work)) for local_work in LOCAL_WORKS]
        assert 0 < worths[LOCAL_WORKS.index(1.0)] <= 1
        assert rising(worths)


class Fleet:
    """Three devices, two of them at `ratio` and one at the method's largest; no engine, no wire."""

    def __init__(self, name: str, spec: ModelSpec, ratio: float) -> None:
        self.method, self.spec = method_of(name, spec), spec
        largest = choices_of(name, spec)[-1].ratio
        self.ratios = {"a": ratio, "b": ratio, "c": largest}
        weights = Key.of("prices").generator().standard_normal(spec.size).astype(np.float32)
        self.state = self.method.init_coordinator(weights)
        for device, own in self.ratios.items():
            self.state = self.method.admit(self.state, DeviceReport(device, num_samples=10, ratio=own))
        self.devices = dict.fromkeys(self.ratios, self.method.init_device(weights))

    def round(self, number: int) -> dict[str, tuple[int, int]]:
        """Bytes down and up of each device, as they would travel."""
        method, bytes_of, updates = self.method, {}, {}
        self.state, tasks = method.plan(self.state, Round(number, tuple(self.ratios)), Key(number))
        for device, ratio in self.ratios.items():
            task = codec.encode(tasks[device], self.spec)
            self.devices[device], update = method.work(
                self.devices[device],
                codec.decode(task, method.task_type, self.spec),
                PullToTarget(self.spec, device),
                Budget(ratio),
                Key.of(number, device),
            )
            updates[device] = update
            bytes_of[device] = len(task), len(codec.encode(update, self.spec))
        self.state = method.aggregate(self.state, iter(updates.items()))
        return bytes_of


@each_spec
@pytest.mark.parametrize(
    ("name", "which"),
    [*product(METHODS, (0, 0.5, 1)), *product(MASKED, (1,))],
)
def test_what_is_sent_from_the_second_round_on_is_what_was_priced(name, which, spec):
    choices = choices_of(name, SPECS[spec]())
    choice = choices[round(which * (len(choices) - 1))]
    fleet = Fleet(name, SPECS[spec](), choice.ratio)
    fleet.round(1)
    rounds = [fleet.round(number) for number in range(2, ROUNDS + 1)]
    for direction, priced in enumerate((choice.cost.bytes_down, choice.cost.bytes_up)):
        most = max(sent[device][direction] for sent in rounds for device in ("a", "b"))
        assert most <= ABOVE * priced + OVERHEAD, ("down", "up")[direction]
        assert name in SAVING or priced <= BELOW * most, ("down", "up")[direction]


def weights_of(spec: ModelSpec) -> FlatArray:
    return Key.of("masks").generator().standard_normal(spec.size).astype(np.float32)


def priced(name: str, **settings: float) -> Cost:
    [choice] = from_section({"name": name, **settings}, lenet5()).choices(DeviceReport("d", num_samples=10))
    return choice.cost


def num_bytes_of_mask(mask: MaskArray) -> int:
    return len(codec.encode(Entries(mask[: lenet5().num_parameters]), lenet5())) - len(
        codec.encode(Entries(np.ones(lenet5().num_parameters, bool)), lenet5())
    )


@pytest.mark.parametrize("tau", [0.1, 0.5])
def test_the_marks_of_fedcac_are_priced_at_what_they_take(tau):
    scores = np.abs(weights_of(lenet5()))
    marks = critical_entries(scores, tau, lenet5(), fedcac.MARKED)
    cost = priced("fedcac", tau=tau)
    assert cost.mask_bytes_up == pytest.approx(num_bytes_of_mask(marks), rel=0.05)
    assert cost.bytes_up == cost.bytes_down + cost.mask_bytes_up


@pytest.mark.parametrize(("target", "prunings"), [(0.7, 2), (0.5, 4), (0.1, 11)])
def test_the_mask_of_a_ticket_is_priced_at_its_largest(target, prunings):
    """Its values are fewer then: the whole model, at first, is the most that travels without an encoding."""
    spec, masks = lenet5(), []
    ticket, cost = Everything().mask(spec), priced("lotteryfl", target=target, rate=0.2)
    while share_left(ticket, spec) > target:
        ticket = prune(ticket, weights_of(spec), spec, 0.2)
        masks.append(num_bytes_of_mask(ticket))
    assert len(masks) == prunings
    assert cost.mask_bytes_up == pytest.approx(max(masks), rel=0.05)
    assert cost.bytes_up == cost.bytes_down == codec.estimate_bytes(spec.num_parameters)


@pytest.mark.parametrize("settings", [{"rate": 0.0}, {"target": 1.0}, {"target": 0.0, "rate": 0.9}])
def test_a_ticket_that_never_reaches_its_target_has_a_price(settings):
    cost = priced("lotteryfl", **settings)
    assert (cost.mask_bytes_up > 0) == ("rate" in settings and settings["rate"] > 0)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_cd2_pfed_is_priced_at_what_it_shares_in_the_first_round_and_its_mask_at_nothing(share):
    spec, whole = lenet5(), codec.estimate_bytes(lenet5().num_parameters)
    shared = shared_entries(spec, share)
    assert num_bytes_of_mask(shared.mask(spec)) < 100
    cost = priced("cd2-pfed", private_share=share, growth_rounds=0)
    sent = len(codec.encode(Patch.of(weights_of(spec), shared, spec), spec))
    assert sent <= ABOVE * cost.bytes_up
    assert cost.bytes_up == cost.bytes_down <= ABOVE * sent
    assert priced("cd2-pfed", private_share=share, growth_rounds=5).bytes_up == whole
