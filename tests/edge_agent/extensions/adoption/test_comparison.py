"""What a device uses after a round: the rule, case by case, and how often it harms."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from fleetune.edge_agent.extensions.adoption.adoption_rule import Evaluated
from fleetune.edge_agent.extensions.adoption.comparison import PairedComparison, choose
from fleetune.edge_agent.extensions.adoption.deployed_model import ModelRecord
from fleetune.edge_agent.extensions.adoption.paired_test import LEAST_SAMPLES

RULE = PairedComparison(0.9)
NOISE = np.random.default_rng(0).normal(scale=0.1, size=(4, 40))
NOISE -= NOISE.mean(axis=1, keepdims=True)
STANDING = ModelRecord(
    "a", 5, final_evaluation=False, model="m", input_shape=(2,), num_classes=3, held_out=0.2
)


def model(loss, number=5, *, row=0, num_samples=40, score=None, known=True, **record):
    losses = (loss + NOISE[row, :num_samples]) if known else None
    told = replace(STANDING, round=number, validation_loss=loss, **record)
    return Evaluated(told, losses, score)


def fleet(loss, number=5, row=0, **more):
    return model(loss, number, row=row, **more)


def own(loss, number=5, row=1, **more):
    return model(loss, number, row=row, local_only=True, **more)


def used(in_use, alone, *candidates, rule=RULE, final=False):
    """What is used, by its figures, and why."""
    found = choose(in_use, alone, candidates, rule, final=final)
    return found and Said(found.used.record, found.why)


@dataclass
class Said:
    used: ModelRecord
    why: str

    def __eq__(self, other):
        """It is this model."""
        return self.used == other.record

    __hash__ = None


def test_alone_is_used_until_the_fleets_model_is_shown_to_be_better():
    alone = own(1.0)
    assert used(None, alone, fleet(0.8)) == fleet(0.8)
    assert used(None, alone, fleet(1.2)) == alone
    slightly = used(None, alone, fleet(0.99))
    assert slightly == alone
    assert slightly.why.startswith("local-only; the fleet's model is not shown to be better (loss")


def test_confidence_of_a_half_asks_for_the_lower_loss_only():
    slightly, alone = fleet(0.99), own(1.0)
    assert used(None, alone, slightly) == alone
    assert used(None, alone, slightly, rule=PairedComparison(0.5)) == slightly


def test_a_lower_loss_with_more_mistakes_is_no_gain():
    found = used(None, own(1.0, score=0.9), fleet(0.5, score=0.8))
    assert found.used.local_only
    assert found.why == "local-only; the fleet's model scores 0.8, local-only 0.9"
    assert used(None, own(1.0, score=0.9), fleet(0.5, score=0.9)) == fleet(0.5, score=0.9)


def test_few_held_out_samples_lean_to_alone():
    few = {"num_samples": LEAST_SAMPLES - 3}
    found = used(None, own(2.0, **few), fleet(0.1, **few))
    assert found.used.local_only
    assert found.why.endswith("5 held-out samples show nothing (8 at least): local-only is used")


def test_a_later_model_of_the_fleet_has_to_be_no_worse_than_the_one_in_use():
    in_use, alone = fleet(0.6, 3), own(1.0)
    better, worse = fleet(0.59, 5, row=2), fleet(0.65, 5, row=2)
    assert used(in_use, alone, better) == better
    found = used(in_use, alone, worse)
    assert found == in_use
    assert found.why.startswith("worse than the one in use (loss +")
    assert used(in_use, alone, replace(better, score=0.5)) == replace(better, score=0.5)
    assert used(replace(in_use, score=0.6), alone, replace(better, score=0.5)).used.round == 3


def test_alone_learns_on_and_takes_over_again():
    in_use = fleet(0.6, 3)
    assert used(in_use, own(0.61), fleet(0.9)) == in_use  # no proof is asked for while the run goes on
    found = used(in_use, own(0.5), fleet(0.9))
    assert found == own(0.5)
    assert found.why.startswith("back to local-only: the one in use is not better (loss +")


def test_the_final_evaluation_asks_for_the_whole_proof_once_more():
    in_use, alone = fleet(0.99, 3), own(1.0)
    assert used(in_use, alone, fleet(1.5)) == in_use
    assert used(in_use, alone, fleet(1.5), final=True) == alone
    assert used(fleet(0.8, 3), alone, fleet(1.5), final=True) == fleet(0.8, 3)


def test_alone_follows_its_training_unless_it_got_worse():
    before = own(1.0, 3)
    assert used(before, own(1.01, 5, row=2)) == own(1.01, 5, row=2)
    found = used(before, own(1.3, 5, row=2))
    assert found == before
    assert found.why.startswith("local-only got worse (loss +0.3")


def test_of_an_earlier_run_alone_stays_until_the_new_one_is_as_good():
    before = own(0.5, 9, run="before")
    assert used(before, own(2.0, 1, row=2), fleet(1.0)) == before
    assert used(before, own(0.4, 5, row=2), fleet(1.0)) == own(0.4, 5, row=2)
    assert used(before, own(2.0, 1, row=2), fleet(0.3)) == fleet(0.3)


@pytest.mark.parametrize(
    ("loss", "final", "stays"), [(0.1, False, True), (0.1, True, False), (3.0, False, False)]
)
def test_what_cannot_be_judged_stays_while_its_known_loss_is_lower_and_the_run_goes_on(loss, final, stays):
    before = model(loss, run="before", known=False)
    assert (used(before, own(1.0), fleet(0.5), final=final) == before) == stays
    assert (used(before, None, fleet(0.5), final=final) == before) == stays


def test_without_a_model_trained_alone_what_is_in_use_has_to_be_beaten():
    assert used(None, None, fleet(2.0)).why == "the first of this run"
    assert used(None, None, fleet(2.0, trained=False)) is None
    assert used(fleet(0.5, 3), None, fleet(0.6)) == fleet(0.5, 3)
    assert used(fleet(0.5, 3), None, fleet(0.4)) == fleet(0.4)


def test_without_held_out_samples_the_newest_trained_one_or_alone_is_used():
    none = {"num_samples": 0}
    assert used(fleet(0.5, 3, **none), None, fleet(0.6, **none)).used.round == 5
    assert used(fleet(0.5, 3, **none), own(1.0, **none), fleet(0.4, **none)).used.local_only


def test_asked_again_after_a_crash_it_says_the_same():
    """What was served in between is what had been chosen."""
    rng = np.random.default_rng(3)
    for final in (False, True):
        for _ in range(300):
            base = rng.normal(1.0, 0.3, 25)

            def one(number, base=base, **record):
                told = replace(STANDING, round=number, **record)
                return Evaluated(told, base + rng.normal(rng.normal(0, 0.1), 0.2, 25), rng.integers(3) / 2)

            alone = one(5, local_only=True)
            in_use = [None, one(3), one(3, local_only=True), one(4, run="before")][rng.integers(4)]
            candidates = [one(5, trained=False), one(5)] if final else [one(5)]
            first = choose(in_use, alone, candidates, RULE, final=final)
            again = choose(first.used, alone, candidates, RULE, final=final)
            assert again.used.record.origin == first.used.record.origin


@pytest.mark.parametrize(("worse_by", "most"), [(0.03, 0.2), (0.06, 0.1), (0.1, 0.02)])
def test_a_whole_run_seldom_ends_with_a_model_that_is_worse_than_alone(worse_by, most):
    """Twenty looks at models of the fleet, each in truth worse than alone by the same amount, on the same
    samples; 0.06 is a standard error of one comparison.
    """
    rng, harmed = np.random.default_rng(0), 0
    for _ in range(150):
        base, in_use = rng.normal(1.0, 0.3, 20), None
        for number in range(1, 22):
            alone, theirs = (
                Evaluated(
                    replace(STANDING, round=number, local_only=is_alone),
                    base + rng.normal(0.0 if is_alone else worse_by, 0.2, 20),
                )
                for is_alone in (True, False)
            )
            in_use = choose(in_use, alone, [theirs], RULE, final=number == 21).used
        harmed += not in_use.record.local_only
    assert harmed / 150 <= most
