"""Describes the devices of [fleet]: their names, boards and links."""

import logging
import math
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from fleetune import firmware_profiles
from fleetune.edge_agent.datasets.dataset import Dataset
from fleetune.edge_agent.datasets.sources import load
from fleetune.edge_agent.probes.board_profile import board_named
from fleetune.protocols.errors import SettingError
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.round import RoundSection
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.simulation import FleetSection
from fleetune.protocols.wire.payloads import run_key
from fleetune.tools.links.fleet_links import links_of
from fleetune.tools.links.link import Constant, Link

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeviceSpec:
    """One device of a simulated fleet, as the settings describe it.

    Attributes:
        name: name in the fleet.
        index: number of the device and of its part of the data, from 0.
        board: profile of its board.
        link: its link.
        ratio: fixed model ratio; None if the device chooses its ratio.
        speed: speed of its board relative to the profile.
        charge: charge of its battery at the start of the run; None if it has mains power.
        jitter: variation of its training time between rounds, see [fleet].
        key: key of its random draws.
    """

    name: str
    index: int
    board: firmware_profiles.Board
    link: Link
    ratio: float | None = None
    speed: float = 1.0
    charge: float | None = None
    jitter: float = 0.0
    key: Key | None = None

    def slowness(self, round_attempt: tuple[int, int]) -> float:
        """Return the factor on the device's training time for this attempt at this round."""
        if not self.jitter or self.key is None:
            return 1.0
        return math.exp(self.jitter * self.key.child("jitter", *round_attempt).generator().standard_normal())


def with_group_devices(settings: RunSettings, dataset: Dataset | None = None) -> RunSettings:
    """Return the settings with one device for each group of the data, if `fleet.devices` is missing.

    If several groups share a device, a warning is logged.

    Args:
        settings: settings of a run.
        dataset: the run's samples; None loads them if necessary.

    Raises:
        DataError: see `edge_agent.datasets.sources.load`.
        SettingError: the data has no groups.
    """
    if settings.data.partition.kind != "group":
        return settings
    group = (dataset or load(settings.data.source, None)).group
    count = 0 if group is None else np.unique(group).size
    devices = settings.fleet.devices
    if not devices and not count:
        raise SettingError("data.partition.kind: `group` needs a source with a `group` column")
    if 0 < devices < count:
        log.warning(
            "%d groups share fleet.devices = %d, several to a device; leave it out for one device a group",
            count,
            devices,
        )
    return settings if devices else replace(settings, fleet=replace(settings.fleet, devices=count))


def device_specs(fleet: FleetSection, seed: int) -> list[DeviceSpec]:
    """Return all devices; boards are assigned in the order in which [fleet] lists them.

    Args:
        fleet: [fleet].
        seed: seed of the run.

    Raises:
        SettingError: an unknown board or link, or more boards or links than devices.
    """
    if (listed := sum(fleet.boards.values())) > fleet.devices:
        raise SettingError(
            f"fleet.boards lists {listed} boards, but fleet.devices = {fleet.devices}; list at most one for"
            " each device"
        )
    names = [name for name, count in fleet.boards.items() for _ in range(count)]
    names += [firmware_profiles.UNKNOWN] * (fleet.devices - len(names))
    width = len(str(fleet.devices - 1))
    return [
        _device(f"device-{index:0{width}d}", index, board_named(name), link, fleet, seed)
        for index, (name, link) in enumerate(zip(names, links_of(fleet, seed), strict=True))
    ]


def check_counts(rounds: RoundSection, num_devices: int) -> None:
    """Raise SettingError if a round waits for more devices than the fleet has."""
    for key in ("start_with", "quorum"):
        wanted, there = getattr(rounds, key), num_devices
        if wanted is not None and wanted > there:
            raise SettingError(
                f"round.{key} = {wanted} is more than fleet.devices = {there}; lower it, or add devices"
            )


def with_start(settings: RunSettings) -> RunSettings:
    """Return the settings with the simulator's default for `round.start_with`, which is 1."""
    return replace(settings, round=replace(settings.round, start_with=settings.round.start_with or 1))


def check_ends(settings: RunSettings) -> None:
    """Raise SettingError if the run has no end, or waits for events that never come."""
    if settings.run.is_open and settings.fleet.days is None:
        raise SettingError('run.rounds = "open": a simulation must end; set fleet.days, e.g. 30, or a number')
    if settings.data.arrivals is not None:
        if settings.fleet.days is None:
            raise SettingError("data.arrivals: the number of days is missing; set fleet.days, e.g. 30")
    elif settings.schedule.asks_devices:
        raise SettingError(
            "schedule.new_samples and drift: the data of simulated devices do not grow without"
            ' [data.arrivals]; add it, or say a time, e.g. every = "24h"'
        )


def _device(
    name: str, index: int, board: firmware_profiles.Board, link: Link | None, fleet: FleetSection, seed: int
) -> DeviceSpec:
    key, speed, charge = run_key(seed).child("board", index), 1.0, None
    if fleet.spread or fleet.batteries is not None:
        draws = key.generator()
        speed = math.exp(fleet.spread * draws.standard_normal())
        if fleet.batteries is not None and board.battery_wh is not None:
            charge = float(draws.uniform(*fleet.batteries))
    up, down = fleet.uplink_mbps, fleet.downlink_mbps
    own = Constant(up * 1e6 if up else board.uplink_bps, down * 1e6 if down else board.downlink_bps)
    ratio, jitter = fleet.assigned_ratio(name), fleet.jitter
    return DeviceSpec(name, index, board, link or own, ratio, speed, charge, jitter, key)
