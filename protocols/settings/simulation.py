"""Sections of run.toml for simulations: the fleet, its links, the data partition, and a paper's result.

`edge-coordinator serve` uses `fleet.ratios` of these and names the other keys that are set: a real fleet has
its own devices, links and data.
"""

import re
import zlib
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from fleetune.protocols.bounds import MAX_NUMBER, FleetName, NonNegative, Positive, Share
from fleetune.protocols.settings.section import PROCESSOR, Count, Precision, Settings

Decibels = Annotated[float, Meta(ge=-500, le=500)]
Deviation = Annotated[float, Meta(ge=0, le=100)]  # standard deviation in decibels
Metres = Annotated[float, Meta(ge=1, le=1e9)]
Megahertz = Annotated[float, Meta(ge=1e-6, le=1e6)]
Rate = Annotated[float, Meta(ge=1e-6, le=1e9)]  # Mbit/s
TimeOfDay = Annotated[str, Meta(pattern=r"^([01][0-9]|2[0-3]):[0-5][0-9]\Z")]


class Partition(Settings, frozen=True):
    """[data.partition] How a simulation partitions one data set over its devices.

    Attributes:
        kind: `iid`: at random. `dirichlet`: each class is split over devices by Dir(alpha). `mix`: each
            device has a class mixture q ~ Dir(alpha) and a fixed number of samples. `alpha-rho`:
            Bernoulli(rho) decides which classes a device holds, and each class is split over its holders by
            Dir(alpha). `primary`: 40 to 60 % of a primary class, 20 to 40 % of a secondary one, the rest
            uniform. `group`: by the data's group column, such as person or writer.
        pool: fraction of all samples, drawn at random, that is partitioned.
        alpha: Dirichlet concentration; smaller values give more uneven partitions.
        rho: probability that a device holds a class.
        samples: number of training plus test samples of a device. If left out, all samples are used.
        test_fraction: fraction of a device's samples that form its test split.
    """

    kind: str = "iid"
    pool: Annotated[float, Meta(gt=0, le=1)] = 1.0
    alpha: Positive = 0.5
    rho: Annotated[float, Meta(gt=0, le=1)] = 0.7
    samples: Annotated[int, Meta(ge=2, le=MAX_NUMBER)] | None = None
    test_fraction: Annotated[float, Meta(gt=0, lt=1)] = 0.3


class Change(Settings, frozen=True):
    """[data.arrivals.change] A simulated drift: from some day on, newly arriving samples are changed.

    Attributes:
        kind: `rotate-classes`: each label becomes the next class. `invert`: bytes become 255 - x, other
            numbers -x. `shift`: inputs move by one standard deviation of all inputs. Or your own
            `package.module:function`. It gets the arriving inputs and labels, the day and the device's
            number, and returns inputs and labels, possibly fewer.
        day: the first day with changed samples; the run begins on day 1.
        share: fraction of the devices with changed samples, drawn with the run's seed.
    """

    kind: str
    day: Annotated[int, Meta(ge=1, le=MAX_NUMBER)]
    share: Annotated[float, Meta(gt=0, le=1)] = 1.0


class Arrivals(Settings, frozen=True):
    """[data.arrivals] Simulated devices whose data grow.

    Each device stores arriving samples as a real one does (docs/streams.md). Its deployed model is tested on
    each day's samples before the device may train on them. A device's part of the data set (`data.partition`)
    arrives in an order drawn with the run's seed; samples cut from a series keep their order.

    Attributes:
        first: number of samples that a device has when the run begins.
        per_day: number of samples that arrive in a day. If left out, the rest of the device's part arrives
            evenly over `fleet.days`.
        times_a_day: number of deliveries in a day.
        keep: retention rules, the keys of `edge-agent run --keep-...`, e.g. { keep_days = 7, keep = "newest"
            }.
        change: section [data.arrivals.change]. If left out, samples arrive unchanged.
    """

    first: Count = 100
    per_day: Positive | None = None
    times_a_day: Annotated[int, Meta(ge=1, le=1440)] = 24
    keep: dict[str, Any] = field(default_factory=dict)
    change: Change | None = None


class WirelessSection(Settings, frozen=True):
    """[fleet.wireless] One radio cell around the coordinator. The defaults are those of the KAPC paper,
    Table 4.

    Attributes:
        bandwidth_mhz, power_dbm, distance_m: smallest and largest value of a device, drawn uniformly between
            the two.
        server_bandwidth_mhz, server_power_dbm: bandwidth and power of the coordinator's transmitter.
        gain_db: path gain at 1 m.
        path_loss_exponent: path loss exponent beyond 1 m.
        noise_dbm_hz: thermal noise power density.
        uplink_interference_db, downlink_interference_db: mean and standard deviation of the interference that
            other cells add to the noise. The paper gives no unit; decibels are our choice.
    """

    bandwidth_mhz: tuple[Megahertz, Megahertz] = (10.0, 30.0)
    power_dbm: tuple[Decibels, Decibels] = (23.0, 30.0)
    distance_m: tuple[Metres, Metres] = (100.0, 500.0)
    server_bandwidth_mhz: Megahertz = 50.0
    server_power_dbm: Decibels = 30.0
    gain_db: Decibels = -40.0
    path_loss_exponent: Annotated[float, Meta(gt=0, le=20)] = 4.0
    noise_dbm_hz: Decibels = -174.0
    uplink_interference_db: tuple[Decibels, Deviation] = (1.0, 2.0)
    downlink_interference_db: tuple[Decibels, Deviation] = (1.0, 3.0)

    def __post_init__(self) -> None:
        for name in ("bandwidth_mhz", "power_dbm", "distance_m"):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(f"{name} = [{low:g}, {high:g}]: the smaller number comes first")


class FleetSection(Settings, frozen=True):
    """[fleet] The simulated fleet, also that of the demo. `serve` uses `ratios` and names the other keys
    that are set.

    Attributes:
        devices: number of devices. If left out with `data.partition.kind = "group"`, one for each group.
        boards: number of devices of each board, by the board's name. All other devices are `generic`.
        uplink_mbps, downlink_mbps: link speeds that replace those of the boards.
        links: number of devices on each link, by preset or trace file (`4g`, `my-trace.csv`; `edge-sim link
            presets` lists the presets), in the order of the devices. All other devices keep the link they
            would have without this key.
        wireless: `true`, or a section `[fleet.wireless]`: the devices that `links` leaves out share a radio
            cell with the coordinator.
        ratios: ratios that are assigned to devices in turn instead of the devices' own choice, e.g. [0.2,
            0.4, 0.6, 0.8, 1.0]. A simulated device that is too slow for its ratio becomes a straggler.
            `serve` assigns them too; a real device trains at a smaller ratio if its owner or its limits
            demand it.
        spread: spread of the devices' true speeds around their board's profile, as a standard deviation of
            the logarithm.
        jitter: variation of a device's training time from round to round, as a standard deviation of the
            logarithm.
        batteries: initial charge of devices with a battery, 0 to 1, drawn uniformly between the two numbers.
            Batteries drain and are never charged. If left out, all devices are on mains power.
        policy: every owner's policy, with the keys of `edge-agent run --policy`.
        availability: probability that a device is available when a round starts.
        trainer: training backend: `torch`; or `onnx`, the agents' backend with ONNX Runtime, which is faster
            for small models and gives the agents' bits. The backends differ by rounding.
        train_on: torch devices that train: `cpu`, or accelerators that the workers share, e.g.
            `cuda:0,cuda:1` or `mps`. Each kind rounds differently.
        precision: number format of forward and backward pass in torch. `bfloat16` has 8 significant bits and
            is faster on hardware that supports it. Weights, gradients, the optimiser and all evaluations stay
            `float32`.
        days: simulated days after which the run ends; an open run (`run.rounds`) needs it.
        starts_at: time of day when the simulation begins, on 1 January 2026, for [schedule]. Its `zone` is
            UTC if left out.
    """

    devices: Annotated[int, Meta(ge=0, le=1_000_000)] = 10  # 0: one for each group, see `parse_run`
    boards: dict[str, Annotated[int, Meta(ge=0, le=MAX_NUMBER)]] = field(default_factory=dict)
    uplink_mbps: Rate | None = None
    downlink_mbps: Rate | None = None
    links: dict[str, Annotated[int, Meta(ge=0, le=MAX_NUMBER)]] = field(default_factory=dict)
    wireless: WirelessSection | bool = False
    ratios: tuple[Annotated[float, Meta(gt=0, le=1)], ...] = ()
    spread: Annotated[float, Meta(ge=0, le=1)] = 0.0
    jitter: Annotated[float, Meta(ge=0, le=1)] = 0.0
    batteries: tuple[Share, Share] | None = None
    policy: dict[str, Any] = field(default_factory=dict)
    availability: Annotated[float, Meta(gt=0, le=1)] = 1.0
    trainer: Literal["torch", "onnx"] = "torch"
    train_on: Annotated[str, Meta(pattern=r"^[a-z]+(:[0-9]{1,3})?(,[a-z]+(:[0-9]{1,3})?)*$")] = PROCESSOR
    precision: Precision = "float32"
    days: Annotated[float, Meta(gt=0, le=10_000)] | None = None
    starts_at: TimeOfDay = "00:00"

    @property
    def cards(self) -> tuple[str, ...]:
        """The accelerators of `train_on`; empty if the processor trains."""
        return () if self.train_on == PROCESSOR else tuple(self.train_on.split(","))

    def trains_on(self, worker: int) -> str:
        """Return the torch device of a worker, by the worker's number."""
        cards = self.cards or (PROCESSOR,)
        return cards[worker % len(cards)]

    def assigned_ratio(self, device: str) -> float | None:
        """Return the ratio that `ratios` assigns to a device; None if there are no ratios.

        It depends on the device's name alone, so neither a restart nor the order of joining changes it. A
        name that ends in a number takes the ratio with that number: `device-07` takes the eighth. Any other
        name takes one by its checksum.
        """
        if not self.ratios:
            return None
        number = re.search(r"[0-9]+$", device)
        turn = int(number.group()) if number else zlib.crc32(device.encode())
        return self.ratios[turn % len(self.ratios)]


class PaperSection(Settings, frozen=True):
    """[paper] The result of a paper's table that the file reproduces, for `edge-sim paper`. A run ignores
    it.

    Attributes:
        table: the paper and the table.
        value, deviation: the paper's number and its standard deviation, in the measure's unit (accuracies are
            fractions). The deviation may be left out.
        meaning: what the paper's number measures, in the paper's words.
        accuracy: the measure of ours that corresponds to it, an accuracy or a number of bytes, see
            `tools.papers.measures`.
        samples: number of samples in the whole data set. With a smaller source the run counts as scaled down.
        cpu_minutes: approximate computing time for one seed on one core.
        scaled: what the file itself makes smaller than the paper does.
        open: what the paper leaves open: a key of this file, or of one of its sections, with the reason for
            our choice. Changing such a key does not make the run a scaled one.
        rows: further results of the same table, by name: the sections and keys in which they differ from this
            file, [paper] included. A `method` with another name replaces the file's.
    """

    table: str
    value: NonNegative
    meaning: str
    accuracy: str
    samples: Count
    cpu_minutes: Positive
    deviation: NonNegative | None = None
    scaled: tuple[str, ...] = ()
    open: dict[str, str] = field(default_factory=dict)
    rows: dict[FleetName, dict[str, Any]] = field(default_factory=dict)
