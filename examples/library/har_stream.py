"""UCI HAR as a stream: a phone predicts its person's activity, gets the label later, and learns.

    cd examples/library; export FLEETUNE_DATA=FOLDER   # uci_har/uci_har_inertial.npz or UCI HAR Dataset
    edge-coordinator serve har.toml
    python har_stream.py phone-1 --person 1          # in another terminal
    python har_stream.py phone-2 --person 3          # and another

The phone gets five windows of its person a second, in a fixed random order. After a restart it continues
after its stored windows. A label arrives ten windows later. The script prints how many of the latest 50
windows were recognised when they were new.
"""

import argparse
import asyncio
import logging
import os
from collections import deque
from pathlib import Path

import numpy as np

from fleetune import Agent, load_data

parser = argparse.ArgumentParser()
parser.add_argument("device")
parser.add_argument("--broker", default="127.0.0.1:1883")
parser.add_argument("--person", type=int, default=1)
given = parser.parse_args()
logging.basicConfig(level=logging.WARNING, format="%(message)s")


def windows_of(person: int) -> tuple[np.ndarray, np.ndarray]:
    """Windows of one person, shape (n, 9, 128), and their activities from 0."""
    file = Path(os.environ.get("FLEETUNE_DATA", ".")) / "uci_har" / "uci_har_inertial.npz"
    if not file.exists():
        found = load_data("har:UCI HAR Dataset")
        return found.x[found.group == person], found.y[found.group == person]
    stored = np.load(file)  # windows overlap by half: every second one covers all readings once
    rows = np.flatnonzero(stored["subject"] == person)
    first, second = (stored["halves"][stored["idx"][rows, half]] for half in (0, 1))
    return np.concatenate([first, second], -1), stored["y"][rows].astype(int)


async def main() -> None:
    """The sensor loop, in asyncio: `add`, `label` and `predict` are quick; blocking calls run in a thread."""
    x, y = windows_of(given.person)
    right, late = deque[bool](maxlen=50), deque[tuple[str, int]]()
    agent = await asyncio.to_thread(Agent, given.broker, fleet="har", device=given.device)
    try:
        kept = agent.state.samples
        order = np.random.default_rng(given.person).permutation(len(x))
        for number in range(kept.train + kept.test + kept.unlabelled, len(x)):
            window, activity = x[order[number]], int(y[order[number]])
            prediction = agent.predict(window)
            name = agent.add(window, id=f"window-{number}")
            late.append((name, activity))
            if len(late) > 10:
                agent.label(*late.popleft())
            if prediction is not None:
                right.append(prediction.label == activity)
            if number % 50 == 49:
                print(f"window {number + 1}: {sum(right)} of {len(right)} recognised; {prediction}")
                print(agent.state)
            await asyncio.sleep(0.2)
    finally:
        await asyncio.to_thread(agent.close)


asyncio.run(main())
