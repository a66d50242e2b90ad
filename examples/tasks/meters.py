"""Synthetic hourly readings of twenty households' electricity meters.

Each household has its own rhythm and weekends; all share the weather. `data` returns windows of two days and
the following six hours, in blocks of a week. All windows of a block are for training, or all for testing. The
seed is fixed. For a file of your own use
`csv:meters.csv?label=kwh&columns=kwh&group=house&window=48&horizon=6&block=168`.
"""

import numpy as np

HOUSES, WEEKS, WINDOW, HORIZON, WEEK = 20, 4, 48, 6, 168


def readings(weeks: int = WEEKS) -> np.ndarray:
    """Readings of each hour in kWh, shape (HOUSES, hours)."""
    draw = np.random.default_rng(4)
    hours = np.arange(weeks * WEEK)
    cold = 0.15 * np.cumsum(draw.normal(size=hours.size)) / 10
    found = []
    for _ in range(HOUSES):
        morning, evening = draw.normal(7, 1.5), draw.normal(19, 2)
        size, weekend = draw.uniform(0.4, 1.6), draw.uniform(-0.3, 0.6)
        day = np.exp(-(((hours % 24 - morning) / 2) ** 2)) + 1.6 * np.exp(
            -(((hours % 24 - evening) / 3) ** 2)
        )
        rest = 1 + weekend * (hours // 24 % 7 >= 5)
        noise = 1 + 0.15 * draw.normal(size=hours.size)
        found.append(size * (0.2 + day * rest * noise + 0.2 * cold))
    return np.array(found, np.float32)


def data() -> dict[str, np.ndarray]:
    """Windows, shape (n, 1, WINDOW); the next HORIZON hours; the house of each; the block of each."""
    x, y, group, block = [], [], [], []
    for house, series in enumerate(readings()):
        for week in range(WEEKS):
            own = series[week * WEEK : (week + 1) * WEEK]
            for start in range(0, WEEK - WINDOW - HORIZON + 1, 3):
                x.append(own[None, start : start + WINDOW])
                y.append(own[start + WINDOW : start + WINDOW + HORIZON])
                group.append(house)
                block.append(house * WEEKS + week)
    return {"x": np.array(x), "y": np.array(y), "group": np.array(group), "block": np.array(block)}
