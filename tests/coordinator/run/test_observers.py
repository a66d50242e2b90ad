"""Observers are told everything, in order, once it is durable; one that fails harms nobody."""

import io
import logging

import pytest
from rich.console import Console
from tests.fleet.test_semi_asynchronous import settings
from tests.helpers.talk import Coordinating, answered, run_settings

from fleetune.coordinator.rounds.events import Declined
from fleetune.coordinator.run.observers import ClosedRounds, Observers
from fleetune.coordinator.run.round_journal import ROUNDS
from fleetune.coordinator.run.run_events import (
    Moment,
    Notice,
    ReplyDropped,
    ReplyRefused,
    RoundAbandoned,
    RoundClosed,
    RunBegan,
    RunFinished,
    RunLeft,
)
from fleetune.coordinator.serving.run_observers import observers_of
from fleetune.protocols.wire.messages import TransferKey
from fleetune.tools.simulator.runner import simulate


class Noting:
    """Fails at events of the kind `fails_at`."""

    def __init__(self, fails_at=()):
        self.seen, self._fails_at = [], fails_at

    def observe(self, event):
        self.seen.append(event)
        if isinstance(event, self._fails_at):
            raise ZeroDivisionError("nobody thought of this")

    def kinds(self):
        return [type(event).__name__ for event in self.seen]


def test_one_that_fails_is_left_out_with_one_line_and_may_tidy_up(caplog):
    before, bad, after = Noting(), Noting(fails_at=Notice), Noting()
    observers = Observers([before, bad, after])
    events = [Moment(0.0, None, dict), Notice("one"), Notice("two"), RunLeft()]
    for event in events:
        observers.tell(event)
    assert before.seen == after.seen == events
    assert bad.seen == [*events[:2], RunLeft()]
    assert [record.getMessage() for record in caplog.records] == [
        "Noting no longer watches the run: unexpected ZeroDivisionError (nobody thought of this)"
    ]


def test_one_that_fails_at_everything_is_left_out_too():
    bad = Noting(fails_at=object)
    observers = Observers([bad])
    observers.tell(Notice("one"))
    observers.tell(Notice("two"))
    assert bad.seen == [Notice("one"), RunLeft()]


def test_what_orders_the_whole_run_to_stop_is_no_fault_of_an_observer():
    def stop(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Observers([ClosedRounds(stop)]).tell(RoundClosed(None))


def test_a_simulation_tells_all_from_its_beginning_to_its_end_and_survives_an_observer(tmp_path):
    noting, bad = Noting(), Noting(fails_at=RoundClosed)
    run, _ = simulate(settings(rounds=2), tmp_path / "run", workers=0, fresh=True, observers=[bad, noting])
    records = run.controller.records()
    run.store.close()
    assert isinstance(noting.seen[0], RunBegan)
    assert noting.seen[0].simulated
    assert [event.record for event in noting.seen if isinstance(event, RoundClosed)] == records
    assert len(records) == 3
    assert noting.seen[-2:] == [RunFinished("all rounds are done"), RunLeft()]
    assert bad.kinds()[-2:] == ["RoundClosed", "RunLeft"], "and nothing after it"


@pytest.fixture
def talk(tmp_path):
    noting = Noting()
    talk = Coordinating.of(tmp_path / "run", run_settings(rounds=2), observers=[noting])
    talk.noting = noting
    talk.greet("a", num_samples=10)
    yield talk
    talk.close()


def key(talk, number=1):
    return TransferKey("update", talk.id, number, 1)


def test_the_fate_of_each_reply_is_told_and_a_dropped_one_is_acknowledged(talk):
    session = talk.session("a")
    reply = answered(session, talk.task("a"))
    assert talk.send("a", key(talk), reply[:-1]).refused.startswith("PacketTruncated")
    refused, abandoned = talk.noting.seen
    assert isinstance(refused, ReplyRefused)
    assert (refused.device, refused.round, refused.attempt) == ("a", 1, 1)
    assert abandoned == RoundAbandoned(1, 1, "too-few", ("a",)), "its device is as if it had declined"
    assert talk.send("a", key(talk), reply).refused == "stale: round 1 does not wait for it"
    assert talk.noting.seen[2:] == [ReplyDropped("a", 1, 1, "stale")]


def test_a_whole_reply_that_came_too_late_is_acknowledged_and_dropped(talk):
    """The round closed while it was on its way, and no word of that reached its device."""
    talk.greet("b", num_samples=10)
    session, task = talk.session("a"), talk.task("a")
    reply, link = answered(session, task), talk.server.parts.sessions["a"].link
    link.inbox._objects = lambda _: None
    talk.run.controller.handle(Declined("a", 1, 1, "busy"), 0.0)
    talk.noting.seen.clear()
    assert talk.send("a", key(talk), reply).refused is None
    assert talk.noting.seen == [ReplyDropped("a", 1, 1, "stale")]


def test_a_reply_is_judged_once_on_its_way_in(talk, monkeypatch):
    import fleetune.coordinator.run.reply_intake as asked_in

    reply, judged, rejection_of = answered(talk.session("a"), talk.task("a")), [], asked_in.rejection_of
    monkeypatch.setattr(asked_in, "rejection_of", lambda *of: judged.append(of) or rejection_of(*of))
    controller = talk.run.controller
    actual = talk.server.parts.sessions["a"].actual(0.0)
    outcomes = controller.receive("a", controller.round_attempt, reply, actual, 0.0)
    assert len(judged) == 1
    assert isinstance(outcomes[0], RoundClosed)


def test_observers_hear_of_a_round_only_once_it_is_committed(talk):
    committed, store = [], talk.run.store

    class Looking:
        def observe(self, event):
            if isinstance(event, RoundClosed):
                committed.append(not store._connection.in_transaction)

    talk.server.observers._observers[:] = [Looking()]
    reply = answered(talk.session("a"), talk.task("a"))
    with talk.server.parts.batch.committed(store):
        controller = talk.run.controller
        actual = talk.server.parts.sessions["a"].actual(0.0)
        talk.server.parts.exchange.carry_out(
            controller.receive("a", controller.round_attempt, reply, actual, 0.0)
        )
        assert len(controller.records()) == 1
        assert committed == []
    assert committed == [True]


def test_a_served_run_is_watched_by_its_journal_and_by_people(talk):
    text = io.StringIO()
    watching = observers_of(talk.run, Console(file=text, width=200))
    talk.server.observers._observers[:] = watching._observers
    talk.send("a", key(talk), answered(talk.session("a"), talk.task("a")))
    assert "round 1/2  1/1 replied" in text.getvalue()
    assert (talk.run.folder / ROUNDS).read_bytes().count(b"\n") == 1


def test_the_log_of_an_engineer_names_what_was_dropped(talk, caplog):
    caplog.set_level(logging.INFO)
    observers_of(talk.run, Console(file=io.StringIO())).tell(ReplyDropped("a", 1, 1, "late"))
    assert "a: its reply does not count: late" in caplog.text


def test_a_terminal_has_the_live_view_until_the_run_is_left(talk):
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=120, height=30)
    observers = observers_of(talk.run, console)
    run = talk.run
    observers.tell(RunBegan(talk.id, run.settings, run.controller.records(), simulated=False))
    observers.tell(Moment(1.0, "the broker is away", talk.server.parts.sessions.activities))
    observers.tell(Notice("a line above it"))
    observers.tell(RunLeft())
    assert "the broker is away" in text.getvalue()
    assert "a line above it" in text.getvalue()
    assert "\x1b[?25h" in text.getvalue(), "the cursor is back"
