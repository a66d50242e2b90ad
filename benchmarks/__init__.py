"""Benchmarks of Fleetune against other simulators, encodings and real fleets. They are not part of the wheel.

`python -m benchmarks` lists them; each runs as `python -m benchmarks.NAME` from a checkout.
"""

import os
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]


def environment() -> dict[str, str]:
    """Environment variables of a process that imports `benchmarks` from any folder, on one thread."""
    path = os.pathsep.join(filter(None, (str(CHECKOUT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
