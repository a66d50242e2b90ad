"""A real agent whose data grow is given all that goes wrong: a counter and a line each, and rounds go on.

Wrong labels, numbers that are none, another shape, a class that was never seen, a stretch without samples, a
full disk, a clock that jumps a year forward and back. Nothing that was acknowledged is lost.
"""

import json
import resource
import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest
from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion
from sklearn.datasets import load_digits
from tests.fleet.test_growing_data import trained_on
from tests.helpers.fleet_processes import Fleet, run_toml, wait_until

pytestmark = [pytest.mark.fleet, pytest.mark.nightly]

DEVICE, TOPIC = "device-0", "plant/motor-3"
YEAR_S = 365 * 86_400
DEADLINE_S = 6  # whoever declined is asked again after it
TOML = run_toml(method="fedavg", rounds=1000, devices=1, start_with=1, deadline_s=DEADLINE_S).replace(
    "[run]", "[run]\nfinal_evaluation = false"
)
CLOCK = """
import os, time

_time, _file = time.time, os.environ["CLOCK_FILE"]

def jumping():
    with open(_file) as file:
        return _time() + float(file.read() or 0)

time.time = jumping
"""
BAD = [
    ({"x": [[[0.5] * 8] * 8], "y": -3}, "label"),
    ({"x": [[[0.5] * 8] * 8], "y": 99}, "class"),
    ({"id": "nobody", "y": 1}, "unknown"),
    ({"x": [[[1e300] * 8] * 8], "y": 1}, "not-finite"),
    ({"x": [0.5] * 7, "y": 1}, "shape"),
    ({"x": [], "y": 1}, "empty"),
    ({"x": "hello"}, "not-numbers"),
    ({"y": 1}, "message"),
]


class Sensor:
    """A program that publishes samples, and returns once the broker has them."""

    def __init__(self, port):
        self.client = Client(CallbackAPIVersion.VERSION2)
        self.client.connect("127.0.0.1", port)
        self.client.loop_start()

    def close(self):
        self.client.disconnect()
        self.client.loop_stop()

    def send(self, messages):
        for one in [self.client.publish(TOPIC, json.dumps(one), qos=1) for one in messages]:
            one.wait_for_publish(60)


def digits(first, count):
    found = load_digits()
    rows = range(first, first + count)
    return [
        {
            "x": (found.images[row] / 16)[None].tolist(),
            "y": int(found.target[row]),
            "id": f"s{row}",
        }
        for row in rows
    ]


def kept(fleet):
    """What `edge-agent samples` tells: how many samples are kept, and what was refused."""
    here = ["--fleet", fleet.name, "--device", DEVICE, "--state", str(fleet.folder / "state")]
    command = [sys.executable, "-m", "fleetune.edge_agent.cli", "samples", *here, "--json"]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return sum(row["train"] + row["test"] for row in told["classes"]), told["refused"]


def test_whatever_goes_wrong_costs_a_line_and_the_stream_goes_on(tmp_path):
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(CLOCK)
    offset = tmp_path / "offset"
    offset.write_text("0")
    with Fleet(tmp_path, TOML) as fleet, closing(Sensor(fleet.port)) as sensor:
        fleet.start_coordinator()
        agent = fleet.start_agent(
            DEVICE,
            trainer="onnx",
            data=f"mqtt://127.0.0.1:{fleet.port}/{TOPIC}",
            options=(),
            PYTHONPATH=f"{tmp_path / 'clock'}:{':'.join(sys.path)}",
            CLOCK_FILE=str(offset),
        )
        agent.wait_for("samples come from")

        def stored(count):
            wait_until(lambda: kept(fleet)[0] >= count, f"{count} samples on disk")

        def goes_on():
            """Another round, on all that is kept."""
            done = len(trained_on(fleet, DEVICE))
            wait_until(lambda: len(trained_on(fleet, DEVICE)) > done + 1, "two more rounds")

        wrong = [one | {"y": one["y"] % 5} for one in digits(0, 100)]  # and half of the classes never seen
        sensor.send(wrong)
        stored(100)
        goes_on()
        sensor.send(digits(0, 100))
        goes_on()
        sensor.send([message for message, _ in BAD])
        goes_on()  # with nothing new: an empty day
        for jump in YEAR_S, 0, -YEAR_S, 0:
            offset.write_text(str(jump))
            before, _ = kept(fleet)
            sensor.send(digits(200 + len(trained_on(fleet, DEVICE)), 1))
            stored(before + 1)
            goes_on()
        before, _ = kept(fleet)
        small = 80_000
        resource.prlimit(agent.pid, resource.RLIMIT_FSIZE, (small, resource.RLIM_INFINITY))
        sensor.send(digits(1000, 400))
        agent.wait_for("not taken, disk:")
        assert kept(fleet)[0] < before + 400
        resource.prlimit(agent.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        stored(before + 400)  # the agent tries again by itself
        goes_on()
        assert agent.stop() == 0
        assert not agent.lines("Traceback")
        assert len(agent.lines("holds out no validation samples")) <= 2  # and not in each round
        many, refused = kept(fleet)
        assert many == before + 400
        assert before >= 101
        assert {kind for _, kind in BAD} | {"disk", "clock"} <= refused.keys()
        for kind in {kind for _, kind in BAD} | {"disk", "clock"}:
            assert len(agent.lines(f"not taken, {kind}:")) == 1, kind
        fleet.coordinator.stop()
        assert not fleet.coordinator.lines("Traceback|over-claim")
        assert np.isfinite(trained_on(fleet, DEVICE)[-1])
