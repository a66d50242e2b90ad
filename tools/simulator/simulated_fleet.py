"""The fleet of a run.toml as a simulation has it: names, boards, links, and each device's samples."""

import logging
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from msgspec.structs import replace

from fleetune import firmware_profiles
from fleetune.edge_agent.datasets.dataset import Dataset
from fleetune.edge_agent.datasets.sources import load
from fleetune.edge_agent.probes.board_profile import board_named
from fleetune.edge_agent.training.device_data import (
    DeviceData,
    all_fit,
    check_fits,
    num_stratified,
    scaled,
    take,
)
from fleetune.protocols.errors import SettingError
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.simulation import FleetSection
from fleetune.protocols.tasks import task_of
from fleetune.protocols.wire.payloads import run_key
from fleetune.tools.links.fleet_links import links_of
from fleetune.tools.links.link import Constant, Link
from fleetune.tools.simulator.caller_samples import NO_CALLER_SAMPLES, CallerSamples
from fleetune.tools.simulator.marked_samples import Splits, splits_of
from fleetune.tools.simulator.partition import Rows

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeviceSpec:
    """One device of the fleet.

    Attributes:
        name: in the fleet.
        index: from 0; also of its share of the data.
        board: its profile.
        link: its link.
        ratio: what it runs at whatever that takes; None: what it chooses.
        speed: of its board, relative to the profile.
        charge: of its battery when the run begins; None: it is on the mains.
        jitter: of its training from round to round, see [fleet].
        key: of its own draws.
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

    def slowness(self, turn: tuple[int, int]) -> float:
        """How many times as long as usual training takes in this attempt at this round."""
        if not self.jitter or self.key is None:
            return 1.0
        return math.exp(self.jitter * self.key.child("jitter", *turn).generator().standard_normal())


def with_group_devices(settings: RunSettings, dataset: Dataset | None = None) -> RunSettings:
    """The settings with one device for each group of the data where they leave `fleet.devices` out. Where
    devices are fewer than groups, the log says so.

    Args:
        settings: of a run.
        dataset: its samples; None: they are loaded, if they have to be.

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


def device_specs(settings: RunSettings) -> list[DeviceSpec]:
    """The devices of [fleet], boards in the order they are listed.

    Raises:
        SettingError: an unknown board or link, or more boards or links than devices.
    """
    fleet, seed = settings.fleet, settings.run.seed
    if (listed := sum(fleet.boards.values())) > fleet.devices:
        raise SettingError(f"fleet.boards lists {listed} boards for fleet.devices = {fleet.devices}")
    names = [name for name, count in fleet.boards.items() for _ in range(count)]
    names += [firmware_profiles.UNKNOWN] * (fleet.devices - len(names))
    width = len(str(fleet.devices - 1))
    return [
        _device(f"device-{index:0{width}d}", index, board_named(name), link, fleet, seed)
        for index, (name, link) in enumerate(zip(names, links_of(fleet, seed), strict=True))
    ]


def check_counts(settings: RunSettings) -> None:
    """Raises SettingError: a simulated round waits for more devices than there are."""
    for key in ("start_with", "quorum"):
        wanted, there = getattr(settings.round, key), settings.fleet.devices
        if wanted is not None and wanted > there:
            raise SettingError(f"round.{key} = {wanted} is more than fleet.devices = {there}")


def with_start(settings: RunSettings) -> RunSettings:
    """The settings with the simulator's default of `round.start_with`: round 1 waits for one device."""
    return replace(settings, round=replace(settings.round, start_with=settings.round.start_with or 1))


def check_ends(settings: RunSettings) -> None:
    """Raises SettingError: a virtual clock would go on for ever, or wait for what never comes."""
    if settings.run.is_open and settings.fleet.days is None:
        raise SettingError('run.rounds = "open": a simulation ends; say fleet.days, e.g. 30, or a number')
    if settings.data.arrivals is not None:
        if settings.fleet.days is None:
            raise SettingError("data.arrivals: for how many days do samples come? say fleet.days, e.g. 30")
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
    ratio, jitter = fleet.dealt(name), fleet.jitter
    return DeviceSpec(name, index, board, link or own, ratio, speed, charge, jitter, key)


@dataclass(frozen=True)
class SampleCounts:
    """How many samples a device has."""

    train: int
    validation: int
    test: int

    @classmethod
    def of(cls, data: DeviceData) -> Self:
        """Of these."""
        return cls(data.size("train"), data.size("validation"), data.size("test"))


class PartitionedData:
    """Each device's part of the run's data set, assigned by [data] partition, or as the caller gives it."""

    def __init__(self, settings: RunSettings, caller_samples: CallerSamples = NO_CALLER_SAMPLES) -> None:
        self.dataset = caller_samples.samples(settings)
        caller_samples.check(settings)
        self._settings, self._assigned = settings, caller_samples.assigned
        self._held_out = settings.adoption.validation_fraction(settings.data.validation_fraction)

    @cached_property
    def _rows(self) -> Splits:
        settings, key = self._settings, run_key(self._settings.run.seed).child("partition")
        return splits_of(self.dataset, settings.data.partition, settings.fleet.devices, key, self._assigned)

    def rows(self, index: int) -> Rows:
        """Which samples of the data set are those of device `index`, ascending."""
        return np.sort(np.concatenate(self._rows[index]))

    def of(self, index: int, spec: ModelSpec) -> DeviceData:
        """The samples of device `index`, in the model's shape."""
        train, test = self._rows[index]
        settings = self._settings
        key = run_key(settings.run.seed).child("validation", index)
        data = take(self.dataset, train, test, self._held_out, key)
        fitting = check_fits(data, spec, task_of(settings.task))
        return scaled(fitting, settings.data.mean, settings.data.std, spec)

    def group(self, index: int) -> str:
        """Names of the groups of data that device `index` has; "": the data are not split by group."""
        if self.dataset.group is None or self._settings.data.partition.kind != "group":
            return ""
        return ", ".join(map(str, np.unique(self.dataset.group[self.rows(index)])))

    def sizes(self, spec: ModelSpec) -> list[SampleCounts]:
        """How many samples each device has; none is looked for where that can be told without.

        Raises:
            DataError, SettingError: as `of`, of any device.
        """
        devices = range(self._settings.fleet.devices)
        dataset, marked = self.dataset, self.dataset.validation is not None and not self.dataset.benchmark
        if marked or dataset.block is not None or not all_fit(dataset, spec, task_of(self._settings.task)):
            return [SampleCounts.of(self.of(index, spec)) for index in devices]
        self.of(0, spec)  # what is wrong with all of them
        found = []
        for num_train, num_test in map(self._rows.sizes, devices):
            held_out = num_stratified(num_train, self._held_out)
            found.append(SampleCounts(num_train - held_out, held_out, num_test))
        return found
