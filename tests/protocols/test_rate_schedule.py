"""The learning rate over rounds, against torch's schedulers; what a run writes into its settings."""

import msgspec
import pytest
import torch
from msgspec.structs import replace
from tests.helpers.errors import raises

from fleetune.protocols.errors import SettingError
from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.settings.rate_schedule import (
    in_round,
    rate_factor,
    with_schedule_of_run,
    with_that_of_run,
)
from fleetune.protocols.settings.run_toml import convert


def torch_factors(make, rounds):
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule, factors = make(optimiser), []
    for _ in range(rounds):
        factors.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        schedule.step()
    return factors


def test_cosine_is_torch_s_and_stays_at_its_lowest():
    training = TrainingSection(schedule="cosine", schedule_rounds=20, schedule_floor=0.1)
    wanted = torch_factors(lambda of: torch.optim.lr_scheduler.CosineAnnealingLR(of, 20, 0.1), 20)
    found = [rate_factor(training, number) for number in range(1, 21)]
    assert found == pytest.approx(wanted, abs=1e-12)
    assert rate_factor(training, 21) == rate_factor(training, 500) == found[-1] > 0.1


def test_steps_are_torch_s():
    training = TrainingSection(schedule="step", schedule_rounds=4, schedule_factor=0.3)
    wanted = torch_factors(lambda of: torch.optim.lr_scheduler.StepLR(of, 4, 0.3), 15)
    assert [rate_factor(training, number) for number in range(1, 16)] == pytest.approx(wanted, rel=1e-12)
    assert rate_factor(training, 2**31 - 1) > 0


@pytest.mark.parametrize("schedule", ["constant", "cosine", "step"])
def test_warm_up_rises_in_equal_steps_and_the_schedule_begins_after_it(schedule):
    training = TrainingSection(schedule=schedule, warmup_rounds=4)
    if schedule != "constant":
        training = replace(training, schedule_rounds=10)
    found = [rate_factor(training, number) for number in range(1, 16)]
    assert found[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert found[5:] == sorted(found[5:], reverse=True)
    if schedule == "cosine":  # it is lowest in round 10, the warm-up being part of its rounds
        assert found[8] > found[9] == found[10] > 0


def test_a_round_has_its_learning_rate_and_a_constant_one_the_very_same_section():
    plain = TrainingSection()
    assert in_round(plain, 7) is plain
    warm = TrainingSection(learning_rate=0.4, warmup_rounds=1)
    assert in_round(warm, 1).learning_rate == pytest.approx(0.2)
    assert in_round(warm, 2) is warm


def test_a_run_writes_down_over_how_many_rounds_its_rate_falls():
    cosine, step = TrainingSection(schedule="cosine"), TrainingSection(schedule="step")
    assert with_schedule_of_run(TrainingSection(), 100) == TrainingSection()
    assert with_schedule_of_run(cosine, 100).schedule_rounds == 100
    assert with_schedule_of_run(step, 100).schedule_rounds == 34
    said = replace(cosine, schedule_rounds=7)
    assert with_schedule_of_run(said, 100) == with_schedule_of_run(said, None) == said
    with pytest.raises(SettingError, match=r'^training\.schedule_rounds: .*rounds, which is "open": give it'):
        with_schedule_of_run(cosine, None)


def test_more_rounds_do_not_move_the_schedule_of_a_run_that_has_begun():
    cosine = TrainingSection(schedule="cosine")
    begun = with_schedule_of_run(cosine, 100)
    assert with_that_of_run(cosine, begun) == begun
    said = replace(cosine, schedule_rounds=200)
    assert with_that_of_run(said, begun) == said  # and it is told that it is another one
    assert with_that_of_run(TrainingSection(), begun) == TrainingSection()


def test_a_section_that_uses_none_of_it_is_told_as_ever():
    ever = b'{"epochs":1,"batch_size":32,"learning_rate":0.05,"momentum":0.0,"weight_decay":0.0}'  # of 0.1
    assert msgspec.json.encode(TrainingSection()) == ever
    assert msgspec.json.decode(ever, type=TrainingSection) == TrainingSection()
    used = TrainingSection(optimiser="adamw", betas=(0.8, 0.9), clip_norm=1.0, augment=("crop", "flip"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(used), type=TrainingSection) == used


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"optimiser": "adam"}, ("training.optimiser", "adam", "sgd", "adamw", "rmsprop")),
        ({"schedule": "linear"}, ("training.schedule", "linear", "constant", "cosine", "step")),
        ({"betas": [0.9, 1.0]}, ("training.betas[1]", "1.0")),
        ({"clip_norm": 0}, ("training.clip_norm", "0.0")),
        ({"schedule_factor": 0.0}, ("training.schedule_factor", "0.0")),
        ({"warmup_rounds": -1}, ("training.warmup_rounds",)),
        ({"optimizer": "adamw"}, ("training.optimizer", "optimiser")),
        ({"optimiser": "adamw", "momentum": 0.9}, ("momentum", "adamw", "sgd", "rmsprop")),
        ({"augment": ["flip", "mirror"]}, ("augment", "mirror", "flip", "crop")),
        ({"alpha": 0.5}, ("alpha", "sgd", "rmsprop")),
        ({"schedule_rounds": 5}, ("schedule_rounds", "constant", "cosine", "step")),
    ],
)
def test_a_mistake_gets_a_line_that_names_the_key(section, named):
    class Some(msgspec.Struct):
        training: TrainingSection

    with raises(SettingError, *named):
        convert({"training": section}, Some)
