"""What a device asks for again and again is answered a few times, and then no more: one line says so."""

import logging
from contextlib import closing

import pytest
from tests.helpers.talk import Coordinating, answered, run_settings

from fleetune.coordinator.serving.bundle_server import BundleMade
from fleetune.coordinator.serving.task_exchange import MAX_REQUESTS
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.settings.encoding import ValueEncodings
from fleetune.protocols.update.reference_model import ReferenceModel
from fleetune.protocols.wire import messages as wire
from fleetune.protocols.wire.messages import Ack, Offer, TransferKey

TOO_OFTEN = "asked-too-often"


@pytest.fixture
def talk(tmp_path):
    """A run of two devices in round 3, whose tasks are differences to models that only they hold."""
    settings = run_settings(start_with=2, rounds=9)
    with closing(Coordinating.of(tmp_path, settings, encoding=ValueEncodings())) as talk:
        talk.sessions = {device: talk.session(device) for device in "ab"}
        for device in talk.sessions:
            talk.greet(device, first_weights(talk), num_samples=10)
        for number in (1, 2):
            for device, session in talk.sessions.items():
                reply = answered(session, talk.task(device))
                assert talk.send(device, TransferKey("update", talk.id, number, 1), reply).refused is None
        assert talk.run.controller.round_attempt == (3, 1)
        yield talk


def offers(talk, device):
    """What the device is offered; it takes all of it."""
    found = [
        wire.read_to_device(data) for topic, data in talk.take(device) if data and topic.endswith("/down")
    ]
    found = [one for one in found if isinstance(one, Offer)]
    for offer in found:
        talk.hear(device, Ack(offer.transfer, offer.num_bytes))
    return found


def ready(talk, base, device="a"):
    report = DeviceReport(device, num_samples=10)
    talk.hear(device, wire.Ready(talk.id, talk.run.enrolment.spec.hash, report, base))
    return offers(talk, device)


def refused(talk):
    return talk.run.controller.ledger.refusals.get(TOO_OFTEN, 0)


def first_weights(talk):
    return ReferenceModel.whole(talk.run.enrolment.weights).digest


def test_a_device_that_asks_for_its_task_for_ever_takes_no_part_in_the_round(talk, caplog):
    talk.task("a")
    with caplog.at_level(logging.WARNING):
        sent = [len(ready(talk, first_weights(talk))) for _ in range(50)]
    assert sent == [1] * MAX_REQUESTS + [0] * (50 - MAX_REQUESTS)
    assert talk.run.controller.engine_state.members["a"].answer == "declined"
    (line,) = [record.getMessage() for record in caplog.records]
    assert "a asked 5 times for its task" in line
    reply = answered(talk.sessions["b"], talk.task("b"))
    assert talk.send("b", TransferKey("update", talk.id, 3, 1), reply).refused is None
    assert talk.run.controller.round_attempt == (4, 1)
    assert len(offers(talk, "a")) == 1, "the next round asks it again"


def test_a_device_that_comes_again_may_ask_again(talk):
    talk.task("a")
    for _ in range(3 * MAX_REQUESTS):
        talk.greet("a", talk.sessions["a"].base, num_samples=10)
        talk.task("a")
    assert refused(talk) == 0
    assert talk.run.controller.awaited_attempt("a") == (3, 1)


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (wire.Left, "a asked 5 times to be told that the run goes on"),
        (wire.Fetch, "a asked 5 times for the bundle"),
    ],
)
def test_what_is_asked_for_without_end_is_not_answered_without_end(talk, caplog, message, line):
    talk.server.parts.files.bundles.ask = lambda _: BundleMade(b"a bundle")
    talk.task("a")
    with caplog.at_level(logging.WARNING):
        answers = []
        for _ in range(40):
            talk.hear("a", message(talk.id))
            answers += offers(talk, "a")
    assert len(answers) == MAX_REQUESTS
    assert refused(talk) == 40 - MAX_REQUESTS
    (said,) = [record.getMessage() for record in caplog.records if "asked" in record.getMessage()]
    assert line in said
