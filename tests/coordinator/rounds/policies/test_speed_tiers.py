"""Who is asked with prefer = "tiers": devices that take alike long share a round, and nobody is left out."""

from collections import Counter

import pytest
from tests.coordinator.rounds.policies.test_utility_selection import member, rounds

from fleetune.coordinator.rounds.policies.utility_selection import longest_wait
from fleetune.protocols.settings.round import RoundSection

TIERS = RoundSection(participants=3, prefer="tiers")
SECONDS = [1.0, 1.1, 1.2, 1.3, 9.0, 10.0, 11.0, 12.0, 95.0, 100.0, 105.0, 110.0]


def fleet(seconds=SECONDS, **fields):
    return {
        f"d{n:02}": member(f"d{n:02}", took_s=taken, asked_in=0, **fields) for n, taken in enumerate(seconds)
    }


def lasts(drawn, members):
    return [max(members[name].observed.took_s for name in one) for one in drawn]


def test_a_round_costs_what_its_devices_do_and_not_what_the_slowest_of_all_does():
    """Drawn each by itself, three rounds in four have one of the slow four."""
    members = fleet()
    in_all = {
        prefer: sum(lasts(rounds(members, 120, RoundSection(participants=3, prefer=prefer)), members))
        for prefer in ("any", "oort", "tiers")
    }
    assert in_all["tiers"] < 0.85 * in_all["oort"]
    assert in_all["tiers"] < 0.35 * in_all["any"]


def test_who_is_slow_meets_those_that_are_nearly_as_slow():
    members = fleet()
    slow = [
        one for one in rounds(members, 200, TIERS) if max(members[name].observed.took_s for name in one) > 90
    ]
    alike = sum(members[name].observed.took_s > 90 for one in slow for name in one)
    assert alike > 0.7 * 3 * len(slow), "three places for four of them: one is left over"


def test_everybody_takes_part_at_last():
    drawn = rounds(fleet(), 120, TIERS)
    share = Counter(name for one in drawn for name in one)
    assert len(share) == 12
    assert min(share.values()) >= 120 // (longest_wait(12, 3) + 12 // 3)


def test_of_alike_devices_who_has_more_to_teach_is_asked_more_often():
    members = fleet([10.0] * 6, loss=0.5) | {"more": member("more", took_s=10.0, asked_in=0, loss=1.0)}
    share = Counter(
        name for one in rounds(members, 300, RoundSection(participants=1, prefer="tiers")) for name in one
    )
    assert share["more"] > 1.3 * max(count for name, count in share.items() if name != "more")


@pytest.mark.parametrize("claimed", [{"loss": 1e30}, {"samples": 10_000_000}, {"says_s": 1e-9}])
def test_who_claims_what_it_likes_is_asked_hardly_more_often_than_who_has_twice_as_much(claimed):
    """Of time the coordinator's own clock speaks alone."""
    most = {"loss": 2.0} if "loss" in claimed else {"samples": 200} if "samples" in claimed else {}

    def times(**fields):
        members = fleet([10.0] * 6) | {"liar": member("liar", took_s=10.0, asked_in=0, **fields)}
        return sum("liar" in one for one in rounds(members, 100, TIERS))

    assert times(**claimed) == times(**most)


@pytest.mark.parametrize("says_s", [5e-324, 1e-9, 1.0])
def test_who_says_that_it_is_quick_and_never_replies_counts_as_a_usual_one(says_s):
    members = fleet() | {"liar": member("liar", took_s=None, says_s=says_s, asked_in=0)}
    drawn = rounds(members, 120, TIERS)
    share = Counter(name for one in drawn for name in one)
    assert share["liar"] < min(share[name] for name in ("d00", "d01", "d02"))
    assert sum(lasts(drawn, members | {"liar": members["d00"]})) < 1.5 * sum(
        lasts(rounds(fleet(), 120, TIERS), fleet())
    )


def test_where_nobody_is_known_all_are_drawn():
    members = {f"d{n}": member(f"d{n}", took_s=None, loss=None, asked_in=0) for n in range(6)}
    (first,) = rounds(members, 1, TIERS)
    assert len(set(first)) == 3
    assert rounds({"d0": members["d0"]}, 1, TIERS) == [("d0",)]
