"""What a round would take, the largest ratio that fits, and the line that says why."""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.world import CAPABILITY, CHOICES, Device, World, behind

from fleetune import firmware_profiles
from fleetune.coordinator.export.activation_bytes import activation_bytes
from fleetune.coordinator.run.enrolment import prepare
from fleetune.edge_agent.budget.cost_forecast import (
    EVALUATIONS,
    MEMORY_MODELS,
    capability_of,
    demand,
    predict,
)
from fleetune.edge_agent.budget.cost_history import CostHistory
from fleetune.edge_agent.budget.owner_policy import Limits
from fleetune.edge_agent.budget.ratio_choice import check_limits, decide
from fleetune.edge_agent.probes.board_profile import report_of
from fleetune.edge_agent.training.descent import OptimiserFootprint
from fleetune.edge_agent.training.trainers import KINDS
from fleetune.protocols.method.choice import EVALUATION_EPOCHS, Choice, Cost, DeviceReport
from fleetune.protocols.model.architectures import build
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.settings.run_toml import parse_run

NOTHING = CostHistory()
MASK = 0.25  # of a model; counted at ratio 1 too, so that a lower ratio never asks for more


def forecast(capability=CAPABILITY, cost_history=NOTHING):
    return partial(predict, capability=capability, cost_history=cost_history)


def decided(limits, wanted=1.0, capability=CAPABILITY, current=None, choices=CHOICES):
    return decide(choices, forecast(capability), limits, wanted=wanted, current=current)


def ratio_of(decision):
    return decision.choice.ratio if decision.choice else 0.0


def test_the_prediction_of_a_round():
    predicted = predict(CHOICES[3], CAPABILITY, NOTHING)
    assert (predicted.bytes_down, predicted.bytes_up) == (400_000, 400_000)
    assert (predicted.download_s, predicted.train_s) == (0.32, 4.0)
    assert predicted.upload_s == pytest.approx(3.2e6 / 1.1e6)
    assert predicted.memory_bytes == 200e6 + (3 + MASK) * 1e6 + 2.5 * 800_000 + 32 * 50_000
    assert predicted.joules == pytest.approx(2 * 0.32 + 5 * 4 + 3 * 3.2 / 1.1)


def test_a_reply_also_takes_the_round_trip_of_its_receipt():
    """Down: the bytes, behind their offer. Up: the bytes and their receipt."""
    predicted = predict(CHOICES[3], behind(latency_s=0.5), NOTHING)
    assert predicted.download_s == pytest.approx(0.32)
    assert predicted.upload_s == pytest.approx(0.5 + 3.2 / 1.1)


def test_a_first_small_upload_does_not_make_a_large_one_look_dear():
    """Behind a link of 75 ms and 0.375 Mbit/s: what a kilobyte takes is the dialogue, not the bytes."""
    small = RoundCost(bytes_up=1000, upload_s=2 * 0.075 + 8000 / 0.375e6)
    seen = NOTHING.learned(demand(CHOICES[0], CAPABILITY), small)
    able = behind(latency_s=2 * 0.075)
    predicted = predict(CHOICES[3], able, seen)
    assert predicted.upload_s == pytest.approx(2 * 0.075 + predicted.bytes_up * 8 / 0.375e6, rel=0.1)


def test_work_counts_by_epoch_and_the_evaluations_of_the_test_split_too():
    choice = Choice(0.5, Cost(1000, 1000, work=0.5, memory_bytes=7_000_000, extra_epochs=3))
    able = replace(CAPABILITY, num_test=40, batch_size=64)
    asked = demand(choice, able)
    assert asked.samples == pytest.approx((0.5 * 2 + 3) * 100 + EVALUATIONS * EVALUATION_EPOCHS * 40)
    assert predict(choice, able, NOTHING).train_s == pytest.approx(asked.samples / 50)
    assert asked.working_bytes == (3 + MASK) * 1_000_000 + 2.5 * 2000 + 96 * 50_000 + 7_000_000


@pytest.mark.parametrize(
    ("batch_size", "samples_held"), [(8, 48), (64, 3 * 64)], ids=["evaluation", "training"]
)
def test_memory_depends_on_what_trains(batch_size, samples_held):
    able = replace(CAPABILITY, batch_size=batch_size, trainer="onnx")
    asked = demand(CHOICES[3], able)
    assert asked.working_bytes == 16e6 + (3.5 + MASK) * 1e6 + 0.5 * 800_000 + samples_held * 50_000
    assert set(MEMORY_MODELS) == set(KINDS)


@pytest.mark.parametrize(
    ("share", "momentum", "copies"),
    [(1, 0, 0.25), (1, 0.9, 1.25), (0.5, 0.9, 1.25), (0.16, 0, 0.08), (0.16, 0.9, 0.24)],
)
def test_the_optimiser_holds_what_trains(share, momentum, copies):
    cost = replace(CHOICES[3].cost, trainable_share=share)
    able = replace(CAPABILITY, optimiser=OptimiserFootprint(per_trained=int(momentum > 0)))
    more = demand(Choice(0.4, cost), able).working_bytes - demand(CHOICES[3], CAPABILITY).working_bytes
    assert more == pytest.approx((copies - MASK) * 1_000_000)


@pytest.mark.parametrize(
    ("unknown", "quantities"),
    [
        (replace(CAPABILITY, samples_per_s=None), {"train_s", "joules"}),
        (behind(uplink_bps=None), {"upload_s", "joules"}),
        (behind(downlink_bps=None), {"download_s", "joules"}),
        (replace(CAPABILITY, base_bytes=None), {"memory_bytes"}),
        (replace(CAPABILITY, watts=replace(CAPABILITY.watts, train=None)), {"joules"}),
    ],
)
def test_what_is_not_known_is_not_predicted(unknown, quantities):
    predicted = predict(CHOICES[3], unknown, NOTHING)
    missing = {name for name in RoundCost.__struct_fields__ if getattr(predicted, name) is None}
    assert missing == quantities | {"processor_s", "compression_error"}, "which only rounds show"


def test_the_largest_that_fits_is_taken_and_explained():
    decision = decided(Limits(deadline_s=8.5))
    assert decision.choice.ratio == 0.5
    assert decision.predicted.known_s == pytest.approx(0.4 + 4 + 4 / 1.1)
    assert decision.reason == "p = 0.5: 0.6 would need 8.84 s of 8.5 s (upload 4.36 s at 1.1 Mbit/s)"


def test_the_explanation_names_what_takes_longest():
    slow = replace(CAPABILITY, samples_per_s=10.0)
    assert decided(Limits(deadline_s=24), capability=slow).reason == (
        "p = 0.4: 0.5 would need 24.04 s of 24 s (training 20 s)"
    )


def test_too_little_memory_is_explained_in_megabytes():
    decision = decided(Limits(deadline_s=800, memory_bytes=207_400_000))
    assert decision.reason == "p = 0.5: 0.6 would need 208 MB of 207 MB"


def test_too_little_energy_is_explained_in_joules():
    decision = decided(Limits(deadline_s=800, joules=30.0))
    assert decision.reason == "p = 0.4: 0.5 would need 31.7 J of 30 J"


def test_no_more_than_wanted_is_taken():
    decision = decided(Limits(deadline_s=800), wanted=0.25)
    assert decision.choice.ratio == 0.2
    assert decision.reason == "p = 0.2: as wanted; takes 5.61 s of 800 s"


def test_a_method_that_leaves_no_choice_is_not_limited_by_the_wish():
    only = [Choice(1.0, Cost(1_000_000, 1_000_000))]
    assert decided(Limits(deadline_s=800), wanted=0.2, choices=only).choice.ratio == 1.0


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (Limits(deadline_s=3), "nothing fits: 0.1 would need 4.81 s of 3 s (training 4 s)"),
        (Limits(3, memory_bytes=50_000_000), "nothing fits: 0.1 would need 205 MB of 50 MB"),
        (Limits(joules=2.0), "nothing fits: 0.1 would need 22.3 J of 2 J"),
        (Limits(memory_bytes=0), "nothing fits: 0.1 would need 205 MB of 0 MB"),
    ],
)
def test_when_nothing_fits_the_device_declines_with_the_figures(limits, reason):
    decision = decided(limits)
    assert decision.choice is None
    assert decision.reason == reason
    assert decision.predicted == predict(CHOICES[0], CAPABILITY, NOTHING)


def test_what_is_unknown_does_not_limit_and_is_said():
    unknown = replace(behind(uplink_bps=None), samples_per_s=None, base_bytes=None)
    decision = decided(Limits(3, 1_000_000, 0.1), capability=unknown)
    assert decision.choice.ratio == 1.0
    assert decision.reason == "p = 1: as wanted; takes 0.8 s of 3 s, training and upload unknown"


def test_a_larger_ratio_than_the_present_one_needs_something_to_spare():
    needs_s = predict(CHOICES[5], CAPABILITY, NOTHING).known_s
    tight = Limits(deadline_s=needs_s / 0.97)
    assert decided(tight).choice.ratio == 0.6
    assert decided(tight, current=0.6).choice.ratio == 0.6
    assert decided(tight, current=0.8).choice.ratio == 0.6
    decision = decided(tight, current=0.4)
    assert decision.choice.ratio == 0.5
    assert decision.reason.endswith("at 1.1 Mbit/s), less than 5 % to spare")


def test_every_choice_is_held_against_every_limit():
    table = check_limits(CHOICES, forecast(), Limits(8.5, 210_000_000, 60.0))
    assert [verdict.choice for verdict in table] == CHOICES
    assert [verdict.binds for verdict in table] == ["memory"] * 5 + ["time"] * 5
    assert [verdict.share <= 1 for verdict in table] == [True] * 5 + [False] * 5
    assert table[0].shares == {
        "time": pytest.approx(4.807 / 8.5, rel=1e-3),
        "memory": pytest.approx((205.1 + MASK) / 210),
        "energy": pytest.approx(22.34 / 60, rel=1e-3),
    }
    assert check_limits(CHOICES, forecast(), Limits())[0].binds is None


def test_the_report_carries_what_was_decided():
    report = DeviceReport("d")
    decision = decided(Limits(deadline_s=8.5))
    told = decision.reported(report)
    assert (told.ratio, told.reason, told.round_s) == (0.5, decision.reason, decision.predicted.round_s)
    nothing = decided(Limits(deadline_s=1))
    assert nothing.choice is None
    assert nothing.reported(told) == replace(told, reason=nothing.reason)


def test_a_runs_capability_is_the_boards_and_the_enrolments():
    enrolment = prepare(
        parse_run(
            {
                "run": {"name": "r"},
                "model": {"name": "mlp", "input_shape": [1, 8, 8], "num_classes": 10},
                "method": {"name": "fedspu"},
                "training": {"epochs": 3, "batch_size": 8},
            }
        )
    )
    assert enrolment.activation_bytes_per_sample == 4 * (64 + 64 + 32)  # the input and two hidden layers
    board = firmware_profiles.load("raspberry-pi-4b")
    report = report_of("d", board, num_samples=90, flops_per_sample=enrolment.flops_per_sample)
    able = capability_of(
        report, board, enrolment, trainer="onnx", num_test=10, latency_s=0.1, base_bytes=1000
    )
    assert (able.num_samples, able.num_test, able.epochs, able.batch_size) == (90, 10, 3, 8)
    assert able.trainer == "onnx"
    assert able.model.num_bytes == 4 * enrolment.weights.size
    assert (able.samples_per_s, able.link.uplink_bps) == (report.samples_per_s, board.uplink_bps)
    assert (able.watts.receive, able.watts.train, able.watts.transmit) == (
        board.receive_w,
        board.train_w,
        board.transmit_w,
    )
    generic = firmware_profiles.load("generic")
    assert capability_of(report, generic, enrolment, trainer="torch").watts.train is None


def test_activations_grow_with_the_model_and_not_with_how_they_are_counted():
    lenet = activation_bytes(build("lenet5", (3, 32, 32), 10), (3, 32, 32))
    kept = (
        3 * 32 * 32 + 6 * 28 * 28 + 6 * 14 * 14 + 16 * 10 * 10 + 16 * 5 * 5 + 120 + 84
    )  # what each layer takes
    indices = 2 * (6 * 14 * 14 + 16 * 5 * 5)  # of the two poolings, int64
    assert lenet == 4 * (kept + indices)


SPEEDS = st.floats(1e3, 1e9)
MORE = st.floats(1.001, 10)


@given(SPEEDS, st.floats(1, 100), st.floats(1, 1000), st.integers(205, 212), st.floats(10, 100), MORE)
def test_more_of_anything_never_gives_a_smaller_ratio(
    up_bps, samples_per_s, deadline_s, memory_mb, joules, more
):
    able = replace(behind(uplink_bps=up_bps), samples_per_s=samples_per_s)
    limits = Limits(deadline_s, memory_mb * 1_000_000, joules)
    for current in (None, 0.1, 0.5):
        ratio = partial(lambda *a, **k: ratio_of(decided(*a, **k)), current=current)
        least = ratio(limits, capability=able)
        faster_links = [
            replace(able.link, **{name: getattr(able.link, name) * more})
            for name in ("uplink_bps", "downlink_bps")
        ]
        for faster in (
            *(replace(able, link=link) for link in faster_links),
            replace(able, samples_per_s=able.samples_per_s * more),
        ):
            assert ratio(limits, capability=faster) >= least
        for name in ("deadline_s", "memory_bytes", "joules"):
            wider = replace(limits, **{name: getattr(limits, name) * more})
            assert ratio(wider, capability=able) >= least
            assert ratio(replace(limits, **{name: None}), capability=able) >= least
        for unknown in (
            replace(able, link=replace(able.link, uplink_bps=None)),
            replace(able, link=replace(able.link, downlink_bps=None)),
            replace(able, samples_per_s=None),
            replace(able, base_bytes=None),
            replace(able, watts=replace(able.watts, train=None)),
        ):
            assert ratio(limits, capability=unknown) >= least


@given(
    st.lists(st.sampled_from(CHOICES), min_size=1, max_size=12),
    st.sampled_from(["uplink_bps", "downlink_bps", "samples_per_s"]),
    SPEEDS,
    st.floats(1, 200),
    MORE,
)
def test_more_of_anything_never_gives_a_smaller_ratio_after_learning(tried, name, speed, deadline_s, more):
    """The same rounds in two worlds, one of which is faster in one respect."""

    def taught(factor):
        world = World(**{name: (speed / 1000 if name == "samples_per_s" else speed) * factor})
        device = Device(world, Limits())
        for choice in tried:
            device.learn(choice)
        return device.cost_history

    before, after = (forecast(cost_history=taught(factor)) for factor in (1, more))
    for choice in CHOICES:
        assert after(choice).known_s <= before(choice).known_s * (1 + 1e-9)
    limits = Limits(deadline_s * (1 + 1e-6))
    assert ratio_of(decide(CHOICES, after, limits, wanted=1.0)) >= ratio_of(
        decide(CHOICES, before, Limits(deadline_s), wanted=1.0)
    )
    for name_ in ("memory_bytes", "joules"):
        one, two = ({name_: amount} for amount in (260_000_000, round(260_000_000 * more)))
        assert ratio_of(decide(CHOICES, before, Limits(**two), wanted=1.0)) >= ratio_of(
            decide(CHOICES, before, Limits(**one), wanted=1.0)
        )
