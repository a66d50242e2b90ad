"""An agent notices that it waits too long for its coordinator."""

from dataclasses import dataclass, field
from itertools import pairwise

from fleetune.edge_agent.run.coordinator_timeout import AGAIN_S, COORDINATOR_TIMEOUT_S, CoordinatorTimeout
from fleetune.protocols.wire.messages import Offer, Resume, TransferKey
from fleetune.protocols.wire.peer_link import Answered

OFFER = Offer("0" * 32, "0" * 32, 1, TransferKey("enrolment", "run"))
OFFERED = [Answered(OFFER, Resume(OFFER.transfer, 0))]


class Box:
    def __init__(self):
        self.keys, self.progress = [], None

    def __bool__(self):
        return bool(self.keys)


@dataclass
class Link:
    outbox: Box = field(default_factory=Box)
    inbox: Box = field(default_factory=Box)


def noticed(silence, link, until_s):
    """The seconds at which it asks for an examination."""
    return [second for second in range(until_s + 1) if silence.look(link, float(second))]


def test_nothing_is_awaited_before_the_connection_and_without_it():
    silence = CoordinatorTimeout()
    assert noticed(silence, Link(), 100) == []
    silence.connected()
    silence.disconnected()
    assert noticed(silence, Link(), 100) == []
    assert silence.wake_at is None


def test_connected_and_nothing_comes():
    silence = CoordinatorTimeout()
    silence.connected()
    assert noticed(silence, Link(), 1000) == [COORDINATOR_TIMEOUT_S]


def test_an_idle_agent_that_was_enrolled_awaits_nothing():
    silence = CoordinatorTimeout()
    silence.connected()
    silence.heard(OFFERED)
    assert noticed(silence, Link(), 1000) == []


def test_an_enrolment_offered_again_and_again_shows_that_our_answers_are_not_heard():
    silence = CoordinatorTimeout()
    silence.connected()
    for _ in range(2):
        silence.heard(OFFERED)
    assert noticed(silence, Link(), 1000) == [COORDINATOR_TIMEOUT_S]
    silence.heard([])
    silence.heard(OFFERED)
    assert noticed(silence, Link(), 1000) == []


def test_what_is_sent_or_received_without_progress():
    for name in ("outbox", "inbox"):
        silence, link = CoordinatorTimeout(), Link()
        silence.connected()
        silence.heard([])
        box = getattr(link, name)
        box.keys, box.progress = ["update"], 0.0
        assert not silence.look(link, 0.0)
        for second in range(1, 100):
            box.progress = second / 100  # it goes on, however slowly
            assert not silence.look(link, 9.0 * second)
        assert silence.look(link, 9.0 * 99 + COORDINATOR_TIMEOUT_S)


def test_examinations_are_rare():
    silence = CoordinatorTimeout()
    asked = []
    for second in range(2000):
        if second % 20 == 0:
            silence.connected()
            silence.heard([])
            silence.look(Link(), float(second))
            silence.connected()
        asked += [second] if silence.look(Link(), float(second)) else []
    assert len(asked) >= 3
    assert all(later - sooner >= AGAIN_S for sooner, later in pairwise(asked))
