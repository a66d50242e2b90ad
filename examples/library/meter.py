"""An electricity meter: every six hours it forecasts the next six, and learns how right it was.

    cd examples/library; export PYTHONPATH=../tasks
    edge-coordinator serve meters.toml
    python meter.py house-0 --house 0                # in another terminal
    python meter.py house-1 --house 1                # and another

Made-up readings; an hour takes 20 ms here. A window is added without its label, which is what the meter reads
in the next six hours, and comes then. The error told is that of forecasts made before, beside that of saying
"as yesterday".
"""

import argparse
import logging
import time

import numpy as np
from meters import HORIZON, WINDOW, readings

from fleetune import Agent

DAY, MONTH = 24, 112  # hours; forecasts in 28 days

parser = argparse.ArgumentParser()
parser.add_argument("device")
parser.add_argument("--broker", default="127.0.0.1:1883")
parser.add_argument("--house", type=int, default=0)
parser.add_argument("--weeks", type=int, default=52)
given = parser.parse_args()
logging.basicConfig(level=logging.WARNING, format="%(message)s")

kwh = readings(given.weeks)[given.house]
errors, as_yesterday = [], []
with Agent(given.broker, fleet="meters", device=given.device) as agent:
    kept = agent.state.samples
    first = WINDOW + HORIZON * (kept.train + kept.test + kept.unlabelled)  # begun again, it goes on
    for hour in range(first, len(kwh) - HORIZON, HORIZON):
        window = kwh[None, hour - WINDOW : hour]
        forecast = agent.predict(window)
        name = agent.add(window, id=f"hour-{hour}")
        time.sleep(0.02 * HORIZON)
        read = kwh[hour : hour + HORIZON]
        agent.label(name, read)
        if forecast is not None:
            errors.append(np.abs(forecast.numbers - read).mean())
            as_yesterday.append(np.abs(kwh[hour - DAY : hour - DAY + HORIZON] - read).mean())
        if len(errors) == MONTH:
            mine, simple = np.mean(errors), np.mean(as_yesterday)
            print(f"day {hour // DAY}: forecasts are off by {mine:.3f} kWh, as yesterday by {simple:.3f}")
            print(agent.state)
            errors, as_yesterday = [], []
