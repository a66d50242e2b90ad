"""Whole rounds of the five papers' methods, played by the product: they are what independent references made.

What is planned, sent, aggregated and kept, in every round (tests/data/rounds).
"""

import pytest
from tests.protocols.methods.conformance.vectors import agree, cases
from tests.protocols.methods.rounds.all_cases import CASES
from tests.protocols.methods.rounds.product import play
from tests.protocols.methods.rounds.vectors import FOLDER, files, worked

VECTORS = list(cases(FOLDER))
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def rounds_of(method):
    return [at_hand for case in VECTORS if case.function == f"{method}:rounds" for at_hand in case.expected]


@pytest.mark.parametrize("case", VECTORS, ids=str)
def test_product_plays_the_vector(case):
    played = play(case.function.removesuffix(":rounds"), case.inputs, case.seed)
    agree(played, case.expected, atol=case.atol, rtol=case.rtol)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.method}-{case.name}".replace(" ", "_"))
def test_product_is_as_near_to_the_reference_as_float32_is(case):
    inputs, expected = worked(case)
    agree(play(case.method, inputs, case.seed), expected, **CLOSE)


def test_vectors_are_what_the_references_make():
    made = dict(files())
    assert {path.name for path in FOLDER.iterdir()} == set(made)
    for name, text in made.items():
        assert (FOLDER / name).read_text() == text, (
            f"{name}: python -m tests.protocols.methods.rounds.vectors"
        )


def test_fedspu_devices_stop_and_others_go_on():
    stopped = [set(at_hand["stopped"]) for at_hand in rounds_of("fedspu")]
    assert any(stopped)
    assert set().union(*stopped) < set("abcd") or len([s for s in stopped if s]) > 1


def test_srp_pfed_draws_by_memory_and_devices_differ():
    played = rounds_of("srp-pfed")
    tried = {tuple(plan["rates"]) for at_hand in played for plan in at_hand["plan"].values()}
    assert {len(rates) for rates in tried} == {1, 2, 3}
    shared = [{update["mask"].count("1") for update in at_hand["updates"].values()} for at_hand in played]
    assert any(len(counts) > 1 for counts in shared)


def test_bls_drops_layers_both_ways():
    played = rounds_of("kapc-bls")
    omegas = {visit["uploaded"] for at_hand in played for visit in at_hand["visits"].values()}
    assert omegas == {1, 2, 3}
    down = {len(plan["values"]) for at_hand in played for plan in at_hand["plan"].values()}
    assert {0, 26} < down


def test_fedpurin_collaborates_until_beta_and_ties_are_in():
    case = next(case for case in VECTORS if case.function == "fedpurin:rounds")
    at_most = sum(int(0.5 * size) for size in (6, 3, 6, 2, 6, 3)) + 2  # of c.bias, which is zero, all
    assert [bool(at_hand["collaborating"]) for at_hand in case.expected] == [True] * 3 + [False] * 3
    sent = [update["mask"].count("1") for at_hand in case.expected for update in at_hand["updates"].values()]
    assert max(sent) > at_most > min(sent) - 1


def test_dc_pfl_wins_and_loses_trials_and_lets_layers_wait():
    played = rounds_of("dc-pfl")
    votes = [
        [update["trial"] for update in at_hand["updates"].values() if update["trial"]] for at_hand in played
    ]
    won = {sum(new for _, new in vote) < sum(old for old, _ in vote) for vote in votes if vote}
    assert won == {True, False}
    assert {at_hand["phase"] for at_hand in played} == {"watch", "gather", "trial", "settle"}
    uploads = {tuple(plan["upload"]) for at_hand in played for plan in at_hand["plan"].values()}
    assert len(uploads) > 3
