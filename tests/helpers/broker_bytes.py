"""Bytes that devices send in a run, counted at the broker by the type of message, topics included.

python -m tests.helpers.broker_bytes compact      # three devices, eight rounds of LeNet-5, `sketch` up
"""

import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

import paho.mqtt.client as mqtt
from tests.helpers import fleet_processes
from tests.helpers.fleet_processes import Fleet, run_toml

from fleetune.protocols.errors import PacketError
from fleetune.protocols.wire import messages, topics


class Ear:
    """A listener to all messages of a fleet.

    Attributes:
        num_bytes, count: bytes and number of the devices' messages by type. A chunk of an update counts as
            `update`; everything before a device was ready counts as `joining`.
        raw: type and bytes of each of these messages, in order.
    """

    def __init__(self, port, fleet):
        self.num_bytes, self.count, self.raw = Counter(), Counter(), []
        self._ready = set()
        self._client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, client_id="ear")
        self._client.on_message = self._hear
        self._client.connect("127.0.0.1", port)
        self._client.subscribe(f"fleetune/v1/{fleet}/#")
        self._client.loop_start()

    def _hear(self, _client, _userdata, packet):
        channel = topics.parse(packet.topic).channel if "~" not in packet.topic else "here"
        if channel not in ("up", "update", "state") or packet.retain:
            return
        self.raw.append((channel, packet.payload))
        kind = "update" if channel == "update" else self.kind(packet.payload)
        kind = kind if packet.topic.split("/")[3] in self._ready else "joining"
        if self.kind(packet.payload) == "Ready":
            self._ready.add(packet.topic.split("/")[3])
        self.num_bytes[kind] += len(packet.topic) + len(packet.payload)
        self.count[kind] += 1

    def kind(self, data):
        """The type of a small message from a device."""
        try:
            return type(messages.read_from_device(data)).__name__
        except PacketError:
            return "unreadable"

    def close(self):
        self._client.loop_stop()
        self._client.disconnect()


def heard(encoding, rounds, folder):
    """Run devices with this [encoding]; return the listener to their messages, and the run's summary."""
    model = {
        "model": "lenet5",
        "shape": "[1, 28, 28]",
        "source": f"idx:{os.environ['FLEETUNE_DATA']}/fashion-mnist",
    }
    text = run_toml(name="heard", method="fedavg", rounds=rounds, **model) + f"\n[encoding]\n{encoding}\n"
    with Fleet(folder, text) as fleet:
        ear = Ear(fleet.broker.port, fleet.name)
        fleet.start()
        fleet.wait_finished()
        ear.close()
        return ear, fleet.summary()


def main(compact):
    fleet_processes.PATIENCE_S, rounds = 600, 8
    with tempfile.TemporaryDirectory() as folder:
        ear, summary = heard(f'up = "sketch"\n{compact}', rounds, Path(folder))
    turns = 3 * rounds
    print(f"{summary.get('accuracy', summary)!s:.200}")
    for kind, num_bytes in ear.num_bytes.most_common():
        count = ear.count[kind]
        print(
            f"{kind:10} {count:4} times, {num_bytes / count:6.0f} B each, {num_bytes / turns:6.0f} B a round"
        )
    whole = sum(ear.num_bytes.values()) - ear.num_bytes["joining"]
    print(f"all but joining: {whole / turns:.0f} B a round")
    return ear


if __name__ == "__main__":
    found = main("compact = true" if "compact" in sys.argv else "")
    if "--show" in sys.argv:
        for channel, data in found.raw:
            print(channel, data if channel != "update" else data.hex())
