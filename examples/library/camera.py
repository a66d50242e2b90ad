"""A camera with a pretrained network whose head learns from this camera's images.

    cd examples/library; export FLEETUNE_DATA=FOLDER PYTHONPATH=../pretrained   # has fashion-mnist/train-...
    (cd ../pretrained; python pretrain.py)           # pretrained.safetensors, some minutes
    edge-coordinator serve cameras.toml
    python camera.py door --sees 0,2,4,6             # in another terminal: tops
    python camera.py floor --sees 5,7,9              # and another: shoes

The camera gets five images a second of its classes, as bytes. None of them was used for pretraining. It
prints how many of the latest 50 images it recognised before their label arrived.
"""

import argparse
import logging
import time
from collections import deque

import numpy as np
from pretrain import data

from fleetune import Agent

parser = argparse.ArgumentParser()
parser.add_argument("device")
parser.add_argument("--broker", default="127.0.0.1:1883")
parser.add_argument("--sees", default="0,2,4,6")
parser.add_argument("--images", type=int, default=400)
given = parser.parse_args()
logging.basicConfig(level=logging.WARNING, format="%(message)s")

samples = data()
mine = np.flatnonzero(np.isin(samples["y"], [int(one) for one in given.sees.split(",")]))
right = deque[bool](maxlen=50)
with Agent(given.broker, fleet="cameras", device=given.device) as agent:
    for number, row in enumerate(mine[: given.images], start=1):
        image, label = samples["x"][row], int(samples["y"][row])
        prediction = agent.predict(image)
        agent.add(image, label, id=int(row))
        if prediction is not None:
            right.append(prediction.label == label)
        if number % 50 == 0:
            print(f"image {number}: {sum(right)} of {len(right)} recognised; {prediction}; {agent.state}")
        time.sleep(0.2)
