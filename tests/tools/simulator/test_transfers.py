"""How long a simulated transfer takes, against the wire's own dialogue over a link that only delays."""

import heapq
from itertools import count

import pytest

from fleetune.protocols.wire.inbox import Arrived, Inbox
from fleetune.protocols.wire.incoming_parts import PartMemory
from fleetune.protocols.wire.messages import Offer, TransferKey, read_from_device, read_to_device
from fleetune.protocols.wire.outbox import Sent
from fleetune.protocols.wire.peer_link import Packet, PeerLink
from fleetune.tools.links.link import Constant
from fleetune.tools.simulator.transfers import downloaded, uploaded

DELAY_S = 0.075
PAYLOAD = bytes(1000)
OTHER = {"device": "coordinator", "coordinator": "device"}


def dialogue(sender):
    """When, in seconds after it was posted: its offer came, its last byte came, and the sender knew."""
    links = {
        role: PeerLink("pi", role, Inbox("pi", lambda _: PartMemory(), max_bytes=1 << 20)) for role in OTHER
    }
    agenda, order, seen = [], count(), {}

    def do(role, items, now_s):
        for item in items:
            match item:
                case Arrived():
                    seen["arrived"] = now_s
                    do(role, [links[role].accept(item)], now_s)
                case Sent():
                    seen["known"] = now_s
                case Packet():
                    comes = (now_s + DELAY_S, next(order), OTHER[role], item.channel, item.data)
                    heapq.heappush(agenda, comes)

    key = TransferKey("update" if sender == "device" else "task", "run", 1, 1)
    do(sender, links[sender].post(key, PAYLOAD, 0.0), 0.0)
    read = read_from_device if sender == "device" else read_to_device
    while agenda:
        now_s, _, role, channel, data = heapq.heappop(agenda)
        if channel in ("up", "down") and role != sender and isinstance(read(data), Offer):
            seen["offered"] = now_s
        do(role, links[role].hear(channel, data, now_s), now_s)
    return seen


@pytest.mark.parametrize("at_s", [0.0, 1000.0])
def test_a_task_takes_the_dialogue_and_its_bytes(at_s):
    seen = dialogue("coordinator")
    transfer = downloaded(Constant(1e6, 2e6, DELAY_S), at_s, len(PAYLOAD))
    bytes_s = 8 * len(PAYLOAD) / 2e6
    assert transfer.arrives_at == pytest.approx(at_s + seen["arrived"] + bytes_s)
    assert transfer.seconds == pytest.approx(seen["arrived"] - seen["offered"] + bytes_s)


@pytest.mark.parametrize("at_s", [0.0, 1000.0])
def test_a_reply_takes_the_dialogue_and_its_bytes(at_s):
    seen = dialogue("device")
    transfer = uploaded(Constant(1e6, 2e6, DELAY_S), at_s, len(PAYLOAD))
    bytes_s = 8 * len(PAYLOAD) / 1e6
    assert transfer.arrives_at == pytest.approx(at_s + seen["arrived"] + bytes_s)
    assert transfer.seconds == pytest.approx(seen["known"] + bytes_s)
