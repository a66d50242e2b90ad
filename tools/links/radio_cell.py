"""The radio cell of the KAPC paper (Zhi et al. 2024, Table 4): Shannon's rate at each device's distance.

rate = B * log2(1 + P * g / (N0 * B * I)), g = 10^(gain_db / 10) * (distance / 1 m)^-exponent; fading is 1.

Choices that the paper leaves open: Table 4 states interference without a unit. This module uses N(mean,
deviation) decibels on top of the noise (N(1, 4) as a variance: deviation 2), constant for the whole run. Each
device has the coordinator's whole bandwidth.

Differs from the paper: Table 5's FedAvg takes 19.28 s up and 7.16 s down for 42.65 MiB a device, which is
18.6 and 50.0 Mbit/s. Table 4's figures give 7 and 17 Mbit/s on average over devices (8 and 18 without
interference). Bytes over average time give 0.7 and 1.4 Mbit/s. `path_loss_exponent = 3.4` gives 18 and 41
Mbit/s.
"""

import math

from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.simulation import WirelessSection
from fleetune.tools.links.link import Constant


def wireless_link(cell: WirelessSection, key: Key) -> Constant:
    """Return the link of one device; `key` draws its place in the cell."""
    draws = key.generator()
    bandwidth_hz = draws.uniform(*cell.bandwidth_mhz) * 1e6
    power_dbm = draws.uniform(*cell.power_dbm)
    path_db = cell.gain_db - 10 * cell.path_loss_exponent * math.log10(draws.uniform(*cell.distance_m))
    up_db, down_db = draws.normal(*cell.uplink_interference_db), draws.normal(*cell.downlink_interference_db)
    return Constant(
        uplink_bps=shannon_bps(bandwidth_hz, power_dbm + path_db, cell.noise_dbm_hz + up_db),
        downlink_bps=shannon_bps(
            cell.server_bandwidth_mhz * 1e6, cell.server_power_dbm + path_db, cell.noise_dbm_hz + down_db
        ),
    )


def shannon_bps(bandwidth_hz: float, received_dbm: float, noise_dbm_hz: float) -> float:
    """Return a channel's capacity in bits a second, from the received power and the density of all noise."""
    ratio_db = received_dbm - noise_dbm_hz - 10 * math.log10(bandwidth_hz)
    return bandwidth_hz * math.log1p(10 ** (ratio_db / 10)) / math.log(2)
