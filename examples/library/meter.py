"""An electricity meter that forecasts the next six hours, every six hours, and learns from the real values.

    cd examples/library; export PYTHONPATH=../tasks
    edge-coordinator serve meters.toml
    python meter.py house-0 --house 0                # in another terminal
    python meter.py house-1 --house 1                # and another

The readings are synthetic; an hour takes 20 ms here. The meter adds a window without its label. The label is
the readings of the next six hours and is added when they are known. The script prints the error of earlier
forecasts, and the error of the baseline "as yesterday".
"""

import argparse
import logging
import time

import numpy as np
from meters import HORIZON, WINDOW, readings

from fleetune import Agent

DAY, MONTH = 24, 112  # hours of a forecast; number of forecasts in 28 days

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
    # after a restart, continue after the stored windows
    first = WINDOW + HORIZON * (kept.train + kept.test + kept.unlabelled)
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
