"""MQTT traffic like that of an agent, for processes in different network namespaces.

    python tests/helpers/link_traffic.py hub FOLDER AGENTS          broker and receiver, until all agents end
    python tests/helpers/link_traffic.py agent HOST NAME BYTES      sends a payload up and gets it back

Each prints JSON. The hub prints the digest of each agent's payload. An agent prints the digest of the
returned payload, its seconds up (to the last PUBACK), and its seconds up and down together.
"""

import hashlib
import json
import sys
import time
from pathlib import Path
from queue import SimpleQueue

import paho.mqtt.client as mqtt

from fleetune.coordinator.broker.embedded_broker import EmbeddedBroker
from fleetune.protocols.randomness import Key

PORT = 1883
CHUNK_BYTES = 64 << 10
PATIENCE_S = 120


def client(name, host, topic, messages):
    made = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, client_id=name)
    made.on_message = lambda _client, _data, message: messages.put((message.topic, message.payload))
    made.on_connect = lambda one, *_: one.subscribe(topic, qos=1)
    subscribed = SimpleQueue()
    made.on_subscribe = lambda *_: subscribed.put(True)
    made.connect_async(host, PORT)
    made.loop_start()
    subscribed.get(timeout=PATIENCE_S)
    return made


def hub(folder, num_agents):
    messages, digests = SimpleQueue(), {}
    everywhere = "0.0.0.0"
    with EmbeddedBroker.start(Path(folder), port=PORT, bind=everywhere, which="mosquitto"):
        me = client("hub", "127.0.0.1", "up/#", messages)
        print("ready", flush=True)
        done = set()
        while len(done) < num_agents:
            topic, payload = messages.get(timeout=PATIENCE_S)
            name = topic.removeprefix("up/")
            if payload:
                digests.setdefault(name, hashlib.sha256()).update(payload)
                me.publish(f"down/{name}", payload, qos=1)
            else:
                done.add(name)
        me.loop_stop()
    print(json.dumps({name: digest.hexdigest() for name, digest in digests.items()}))


def agent(host, name, num_bytes):
    messages = SimpleQueue()
    me = client(name, host, f"down/{name}", messages)
    payload = Key.of(name).generator().bytes(num_bytes)
    began_at = time.monotonic()
    chunks = [payload[at : at + CHUNK_BYTES] for at in range(0, num_bytes, CHUNK_BYTES)]
    for sent in [me.publish(f"up/{name}", chunk, qos=1) for chunk in chunks]:
        sent.wait_for_publish(PATIENCE_S)
    up_s = time.monotonic() - began_at
    back = b"".join(messages.get(timeout=PATIENCE_S)[1] for _ in chunks)
    both_s = time.monotonic() - began_at
    me.publish(f"up/{name}", b"", qos=1).wait_for_publish(PATIENCE_S)
    me.loop_stop()
    print(json.dumps({"digest": hashlib.sha256(back).hexdigest(), "up_s": up_s, "both_s": both_s}))


if __name__ == "__main__":
    if sys.argv[1] == "hub":
        hub(sys.argv[2], int(sys.argv[3]))
    else:
        agent(sys.argv[2], sys.argv[3], int(sys.argv[4]))
