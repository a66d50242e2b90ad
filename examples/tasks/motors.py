"""Synthetic vibration of twelve motors in windows of 64 readings; some windows are of a damaged bearing.

A motor's vibration is its rotation with two overtones, whose loudness differs between motors, and noise. A
damaged bearing adds short knocks. Normal vibration differs from motor to motor. The seed is fixed. Labels (0
normal, 1 anomaly) are for testing only: training uses no anomalies.
"""

import numpy as np

MOTORS, NORMAL, DAMAGED, LENGTH = 12, 80, 60, 64


def window(draw: np.random.Generator, speed: float, loud: np.ndarray, *, damaged: bool) -> np.ndarray:
    """Vibration of a motor at `speed` (turns a reading), with overtones of loudness `loud`; shape (1,
    LENGTH).
    """
    turned = 2 * np.pi * speed * (np.arange(LENGTH) + draw.uniform(0, 1 / speed)) * draw.normal(1, 0.01)
    wave = sum(size * np.sin(order * turned) for order, size in enumerate(loud, start=1))
    wave += 0.1 * draw.normal(size=LENGTH)
    if damaged:
        knocks = draw.choice(LENGTH, 4, replace=False)
        wave[knocks] += draw.choice([-1, 1], 4) * draw.uniform(1.0, 2.0, 4)
    return wave[None].astype(np.float32)


def data() -> dict[str, np.ndarray]:
    """Windows, shape (n, 1, LENGTH); their labels; the motor of each."""
    draw = np.random.default_rng(9)
    x, y, group = [], [], []
    for motor in range(MOTORS):
        speed, loud = draw.uniform(0.08, 0.16), draw.uniform(0.3, 1.0, 3)
        for number in range(NORMAL + DAMAGED):
            damaged = number >= NORMAL
            x.append(window(draw, speed, loud, damaged=damaged))
            y.append(int(damaged))
            group.append(motor)
    return {"x": np.array(x, np.float32), "y": np.array(y), "group": np.array(group)}
