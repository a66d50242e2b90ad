"""Presets: typical links in the field, by name. Each figure has a source or is marked as an estimate.

Rates and outages are averages. Each device with a preset gets its own random trace.
"""

import math
from dataclasses import dataclass, fields

import numpy as np

from fleetune.protocols.errors import SettingError
from fleetune.protocols.randomness import Key
from fleetune.tools.links.link import Constant, Trace

DAY_S = 86_400.0
PERSISTENCE = 0.8  # correlation of each rate with the previous one, an estimate


@dataclass(frozen=True)
class Figure:
    """One figure of a preset; `source` is a URL or "estimate"."""

    value: float
    source: str = "estimate"


@dataclass(frozen=True)
class Preset:
    """A kind of link.

    Attributes:
        title: short description.
        uplink_mbps, downlink_mbps: mean rate of TCP payload outside outages, 10^6 bits a second.
        delay_ms: one-way delay.
        loss_percent: lost packets, in each direction.
        spread: standard deviation of the rate over its mean.
        outages_per_day: mean number of outages.
        outage_s: mean length of an outage.
        step_s: duration of each drawn rate.
        period_s: length of a drawn trace, which then repeats.
    """

    title: str
    uplink_mbps: Figure
    downlink_mbps: Figure
    delay_ms: Figure
    loss_percent: Figure
    spread: Figure
    outages_per_day: Figure
    outage_s: Figure
    step_s: float
    period_s: float

    def link(self, key: Key) -> Constant | Trace:
        """Return one device's link: a constant link if nothing varies, else a trace drawn from `key`."""
        uplink_bps, downlink_bps = self.uplink_mbps.value * 1e6, self.downlink_mbps.value * 1e6
        delay_s, loss = self.delay_ms.value / 1e3, self.loss_percent.value / 100
        if not self.spread.value and not self.outages_per_day.value:
            return Constant(uplink_bps, downlink_bps, delay_s, loss)
        fading = self._fading(key.child("fading"))
        outages = self._outages(key.child("outages"))
        edges = {edge for outage in outages for edge in outage if edge < self.period_s}
        times_s = tuple(sorted(edges | {step * self.step_s for step in range(len(fading))}))
        factors = [
            0.0 if any(start <= time < end for start, end in outages) else fading[int(time // self.step_s)]
            for time in times_s
        ]
        return Trace(
            times_s,
            tuple(uplink_bps * factor for factor in factors),
            tuple(downlink_bps * factor for factor in factors),
            self.period_s,
            delay_s,
            loss,
        )

    def _fading(self, key: Key) -> list[float]:
        """Return log-normal factors with mean 1, one for each step; neighbours are correlated."""
        draws = key.generator().standard_normal(math.ceil(self.period_s / self.step_s))
        variance = math.log1p(self.spread.value**2)
        level, factors = 0.0, []
        for index, draw in enumerate(draws):
            fresh = math.sqrt(1 - PERSISTENCE**2) if index else 1.0
            level = PERSISTENCE * level + fresh * float(draw)
            factors.append(math.exp(math.sqrt(variance) * level - variance / 2))
        return factors

    def _outages(self, key: Key) -> list[tuple[float, float]]:
        draws = key.generator()
        count = int(draws.poisson(self.outages_per_day.value * self.period_s / DAY_S))
        starts = np.round(draws.uniform(0, self.period_s, count), 3)
        lengths = np.round(draws.exponential(self.outage_s.value, count) + 1e-3, 3)
        return [(float(start), float(start + length)) for start, length in zip(starts, lengths, strict=True)]

    def figures(self) -> list[tuple[str, Figure]]:
        """Return each figure with its name."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return [(name, value) for name, value in values if isinstance(value, Figure)]


_OPENSIGNAL = (
    "https://www.telecomengine.com/article/opensignal-benchmarks-5g-readiness-with-new-usa-analysis/"
)
_OFCOM = "https://www.ispreview.co.uk/index.php/2014/10/rural-vs-urban-gap-closing-average-uk-broadband-speeds-hit-18-7mbps.html"
_LTE_M = "https://rfwireless-world.com/terminology/mobile-communication/lte-m-device-categories-cat-0-cat-m1-cat-m2"
_GIGABIT = "https://mpr-projects.com/index.php/2023/12/15/rpi-nas-part-3-network-connections/"
NEVER = Figure(0, "by definition")

PRESETS = {
    "4g": Preset(
        title="a phone's 4G: Opensignal, USA, first quarter of 2019",
        uplink_mbps=Figure(6.3, _OPENSIGNAL),
        downlink_mbps=Figure(21.3, _OPENSIGNAL),
        delay_ms=Figure(27.5, _OPENSIGNAL),  # round trips of 44.1 to 66.4 ms, by state
        loss_percent=Figure(0),
        spread=Figure(0.5),
        outages_per_day=Figure(24),
        outage_s=Figure(15),
        step_s=5,
        period_s=3600,
    ),
    "rural-dsl": Preset(
        title="a long telephone line; ADSL disconnections of 30 s or more as Ofcom counted them in 2014",
        uplink_mbps=Figure(0.5),
        downlink_mbps=Figure(5),
        delay_ms=Figure(20),
        loss_percent=Figure(0.1),
        spread=Figure(0.1),
        outages_per_day=Figure(0.5, _OFCOM),
        outage_s=Figure(60),
        step_s=600,
        period_s=DAY_S,
    ),
    "lora-backhaul": Preset(
        title="a LoRa gateway's way to the Internet: LTE Cat-M1, half duplex, at its peak rates",
        uplink_mbps=Figure(0.375, _LTE_M),
        downlink_mbps=Figure(0.3, _LTE_M),
        delay_ms=Figure(75),
        loss_percent=Figure(0),
        spread=Figure(0.4),
        outages_per_day=Figure(12),
        outage_s=Figure(60),
        step_s=30,
        period_s=4 * 3600,
    ),
    "factory-wifi": Preset(
        title="802.11n at 2.4 GHz among machines, with roaming and interference",
        uplink_mbps=Figure(20),
        downlink_mbps=Figure(20),
        delay_ms=Figure(3),
        loss_percent=Figure(0.5),
        spread=Figure(0.5),
        outages_per_day=Figure(144),
        outage_s=Figure(3),
        step_s=2,
        period_s=1800,
    ),
    "lan": Preset(
        title="Gigabit Ethernet of a Raspberry Pi 4B or 5, iperf3",
        uplink_mbps=Figure(941, _GIGABIT),
        downlink_mbps=Figure(941, _GIGABIT),
        delay_ms=Figure(0.1),
        loss_percent=NEVER,
        spread=NEVER,
        outages_per_day=NEVER,
        outage_s=NEVER,
        step_s=DAY_S,
        period_s=DAY_S,
    ),
}


def preset(name: str) -> Preset:
    """Return the preset of that name.

    Raises:
        SettingError: no preset has that name; the message lists all names.
    """
    if name not in PRESETS:
        raise SettingError(
            f"no link preset {name!r}; use one of {', '.join(PRESETS)}, or the path of a .csv file"
        )
    return PRESETS[name]
