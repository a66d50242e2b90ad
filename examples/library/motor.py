"""A motor's vibration sensor: it learns the normal vibration of its motor and reports wear.

    cd examples/library; export PYTHONPATH=../tasks
    edge-coordinator serve motors.toml
    python motor.py pump-3 --seed 3                  # in another terminal
    python motor.py pump-4 --seed 4                  # and another
    edge-agent models --fleet motors --device pump-3 # shows the models of a sensor

A killed sensor continues when it is started again.

The windows are synthetic: 64 readings each, 50 windows a second. The motor is worn after --worn-after of
them.
"""

import argparse
import logging
import time
from collections import deque

import numpy as np
from motors import window

from fleetune import Agent

LATEST, ALARM = 50, 0.5

parser = argparse.ArgumentParser()
parser.add_argument("device")
parser.add_argument("--broker", default="127.0.0.1:1883")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--worn-after", type=int, default=3000)
parser.add_argument("--windows", type=int, default=4000)
given = parser.parse_args()
logging.basicConfig(level=logging.WARNING, format="%(message)s")

motor = np.random.default_rng(given.seed)
speed, loud = motor.uniform(0.08, 0.16), motor.uniform(0.3, 1.0, 3)
draw, heard = np.random.default_rng(), deque[bool](maxlen=LATEST)

with Agent(given.broker, fleet="motors", device=given.device) as agent:
    for number in range(1, given.windows + 1):
        worn = number > given.worn_after
        vibration = window(draw, speed, loud, damaged=worn)
        prediction = agent.predict(vibration)
        if prediction is None or not prediction.anomaly:
            agent.add(vibration)  # abnormal windows must not be learned as normal
        if prediction is not None:
            heard.append(bool(prediction.anomaly))
        if len(heard) == LATEST and np.mean(heard) > ALARM:
            print(
                f"window {number}: ALARM, the motor is worn: {sum(heard)} of {LATEST} windows, {prediction}"
            )
            break
        if number % 500 == 0:
            print(f"window {number}: {sum(heard)} of {len(heard)} sound wrong; {agent.state}")
        time.sleep(0.02)
