"""A run admits only agents that read all that it sends, and names what an agent lacks on both sides."""

import logging

import msgspec
import pytest
from tests.helpers.talk import FLEET, SPEC, AgentTalk, Coordinating, run_settings

from fleetune.coordinator.queries.queries import devices
from fleetune.coordinator.serving.bundle_server import BundleMade
from fleetune.protocols.settings.encoding import ValueEncodings
from fleetune.protocols.wire import messages as wire
from fleetune.protocols.wire.capabilities import EVERYTHING, Capabilities, Features
from fleetune.protocols.wire.messages import Ack, NotAdmitted, Offer

SKETCH = ValueEncodings(up="sketch", down="int8")
WITHOUT_SKETCH = Capabilities(1, lacks=Features(("sketch",)))


def begun(folder, encoding=SKETCH):
    return Coordinating.of(folder, run_settings(), encoding=encoding)


@pytest.fixture
def talk(tmp_path):
    talk = begun(tmp_path)
    yield talk
    talk.close()


def answers(talk, device="pi-3"):
    return [
        wire.read_to_device(data) for topic, data in talk.take(device) if data and topic.endswith("/down")
    ]


def greet(talk, reads, device="pi-3", **more):
    """The coordinator's answers to a presence."""
    talk.hear(device, wire.Presence(True, "x", "c-agent 2", reads=reads, **more), "state")
    return answers(talk, device)


def test_a_run_is_offered_to_an_agent_that_reads_it(talk):
    (offer,) = greet(talk, EVERYTHING)
    assert isinstance(offer, Offer)


@pytest.mark.parametrize(
    ("reads", "named"),
    [
        (WITHOUT_SKETCH, ["encoding sketch"]),
        (
            Capabilities(1, lacks=Features(("sketch", "lossless"), ("coded",))),
            ["lossless", "sketch", "coded"],
        ),
        (msgspec.UNSET, ["int8", "lossless", "sketch", "coded"]),
        (Capabilities(also=Features(("sketch", "int8"), ("coded",))), ["encoding lossless"]),
    ],
    ids=str,
)
def test_what_an_agent_lacks_is_named_and_nothing_is_sent(talk, caplog, reads, named):
    (answer,) = greet(talk, reads)
    assert isinstance(answer, NotAdmitted)
    assert answer.run == talk.id
    assert all(word in answer.reason for word in ["pi-3", *named])
    (line,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert answer.reason in line
    assert talk.run.controller.ledger.refusals == {"not-admitted": 1}
    assert not talk.run.controller.members


def test_an_agent_that_was_not_admitted_cannot_take_part(talk):
    greet(talk, WITHOUT_SKETCH)
    talk.hear("pi-3", wire.Ready(talk.id, SPEC.hash, wire.DeviceReport("pi-3", num_samples=10)))
    assert talk.run.controller.ledger.refusals == {"not-admitted": 1, "PacketForeign": 1}
    assert not talk.run.controller.members


def test_the_minimum_suffices_for_a_run_without_encodings(tmp_path):
    talk = begun(tmp_path, ValueEncodings(up="raw", down="raw"))
    (offer,) = greet(talk, msgspec.UNSET)
    assert isinstance(offer, Offer)
    talk.close()


def test_masks_are_coded_only_in_tasks_that_are_differences(tmp_path):
    talk = begun(tmp_path, ValueEncodings(up="int8", down="raw"))
    (offer,) = greet(talk, Capabilities(also=Features(("int8",))))
    assert isinstance(offer, Offer)
    talk.close()


def test_an_agent_is_admitted_once_it_is_updated(talk):
    greet(talk, WITHOUT_SKETCH)
    (offer,) = greet(talk, EVERYTHING)
    assert isinstance(offer, Offer)


def test_a_member_whose_agent_was_replaced_refuses_the_run(talk, tmp_path):
    talk.greet("pi-3", num_samples=10)
    answers(talk)
    assert any(isinstance(one, NotAdmitted) for one in greet(talk, WITHOUT_SKETCH))
    (device,) = devices(tmp_path)
    assert device.doing == "refused"
    assert "encoding sketch" in device.refusal
    assert device.refused == {"not-admitted": 1}
    talk.greet("pi-3", num_samples=10)
    (device,) = devices(tmp_path)
    assert device.refusal is None


def test_an_agent_that_reads_json_only_is_answered_in_json(tmp_path):
    talk = begun(tmp_path, ValueEncodings(up="raw", down="raw"))
    (offer,) = greet(talk, msgspec.UNSET)
    talk.hear("pi-3", wire.encode(Ack(offer.transfer, offer.num_bytes), compact=True))
    talk.hear("pi-3", wire.encode(wire.Fetch(talk.id, "backbone"), compact=True))
    assert not talk.server.parts.sessions["pi-3"].link.compact
    talk.close()


def test_operators_of_the_bundle_are_checked_when_it_is_asked_for(tmp_path):
    talk = begun(tmp_path, ValueEncodings(up="raw", down="raw"))
    greet(talk, Capabilities(1, lacks=Features(operators=("Conv", "Pad"))))
    files = talk.server.parts.files
    files.bundles.ask = lambda _: BundleMade(b"bundle", needed=Features(operators=("Add", "Conv")))
    talk.hear("pi-3", wire.Fetch(talk.id))
    (answer,) = answers(talk)
    assert isinstance(answer, wire.Lacking)
    assert "operator Conv" in answer.reason
    assert "Pad" not in answer.reason
    files.bundles.ask = lambda _: BundleMade(b"bundle", needed=Features(operators=("Add",)))
    talk.hear("pi-3", wire.Fetch(talk.id))
    assert not any(isinstance(one, wire.Lacking) for one in answers(talk))
    talk.close()


@pytest.mark.parametrize("number", [101, 10_000])
def test_a_made_up_list_of_features_costs_one_line(talk, caplog, number):
    names = ",".join(f'"e{index}"' for index in range(number))
    data = '{"type":"Presence","online":true,"instance":"x","version":1,"reads":{"also":{"encodings":[%s]}}}'
    talk.hear("pi-3", (data % names).encode(), "state")
    assert not answers(talk)
    assert "pi-3" not in talk.server.parts.sessions
    assert sum(talk.run.controller.ledger.refusals.values()) == 1
    assert len(caplog.records) == 1


def test_the_name_is_shown_and_the_id_stays(talk, tmp_path, caplog):
    (offer,) = greet(talk, EVERYTHING, name="Küche\x1b")
    talk.hear("pi-3", Ack(offer.transfer, offer.num_bytes))
    talk.hear("pi-3", wire.Ready(talk.id, SPEC.hash, wire.DeviceReport("pi-3", num_samples=10)))
    talk.hear("pi-3", wire.Decline(talk.id, 1, 1, "too warm"))
    assert "Küche (pi-3)" in caplog.text
    (device,) = devices(tmp_path)
    assert (device.device, device.name, device.known_by) == ("pi-3", "Küche", "claim")
    assert (str(device.identity), device.declined_reason) == ("Küche (pi-3)", "too warm")


def test_an_agent_logs_why_it_is_not_admitted(tmp_path, caplog):
    told = []
    agent = AgentTalk(tmp_path)
    agent.agent._notifier._tell = told.append
    reason = "device a lacks encoding sketch; update its agent"
    agent.hear(NotAdmitted(f"{FLEET}-1", reason))
    assert any(reason in record.message for record in caplog.records)
    assert told[-1].resting == reason
    agent.close()


def test_an_agent_announces_its_name_and_all_that_it_reads(tmp_path):
    agent = AgentTalk(tmp_path / "a", name="Küche")
    agent.agent._connection.greet()
    presence = wire.read_from_device(agent.said[-1][1])
    assert (presence.name, presence.reads) == ("Küche", EVERYTHING)
    agent.close()
    agent = AgentTalk(tmp_path / "a")
    agent.agent._connection.greet()
    assert wire.read_from_device(agent.said[-1][1]).name == "Küche"
    agent.close()
