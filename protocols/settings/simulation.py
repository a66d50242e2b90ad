"""What only a simulation heeds of run.toml: its fleet, its links, how it deals data, and a paper's cell.

A real fleet brings itself. `edge-coordinator serve` heeds `fleet.ratios` of this and names what else is set.
"""

import re
import zlib
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from fleetune.protocols.bounds import MAX_NUMBER, FleetName, NonNegative, Positive, Share
from fleetune.protocols.settings.section import PROCESSOR, Count, Precision, Settings

Decibels = Annotated[float, Meta(ge=-500, le=500)]
Deviation = Annotated[float, Meta(ge=0, le=100)]  # in decibels
Metres = Annotated[float, Meta(ge=1, le=1e9)]
Megahertz = Annotated[float, Meta(ge=1e-6, le=1e6)]
Rate = Annotated[float, Meta(ge=1e-6, le=1e9)]  # Mbit/s
TimeOfDay = Annotated[str, Meta(pattern=r"^([01][0-9]|2[0-3]):[0-5][0-9]\Z")]


class Partition(Settings, frozen=True):
    """[data.partition] How a simulation deals one data set to its devices.

    Attributes:
        kind: `iid`; `dirichlet` (each class is dealt over devices by Dir(alpha)); `mix` (each device
            has a class mix q ~ Dir(alpha) and a fixed number of samples); `alpha-rho` (Bernoulli(rho)
            says which classes a device holds, each class is dealt over its holders by Dir(alpha));
            `primary` (a primary class 40-60 %, a secondary 20-40 %, the rest uniform); `group` (by the
            data's group column: person, writer).
        pool: fraction of all samples, drawn at random, that is dealt at all.
        alpha: Dirichlet concentration.
        rho: chance that a device holds a class.
        samples: training plus test samples a device; None: all there are.
        test_fraction: of each device's samples, its own test split.
    """

    kind: str = "iid"
    pool: Annotated[float, Meta(gt=0, le=1)] = 1.0
    alpha: Positive = 0.5
    rho: Annotated[float, Meta(gt=0, le=1)] = 0.7
    samples: Annotated[int, Meta(ge=2, le=MAX_NUMBER)] | None = None
    test_fraction: Annotated[float, Meta(gt=0, lt=1)] = 0.3


class Change(Settings, frozen=True):
    """[data.arrivals.change] How the samples that come change one day: drift.

    Attributes:
        kind: `rotate-classes` (of each label the next class), `invert` (of bytes 255 - x, of numbers -x),
            `shift` (by a standard deviation of all inputs), or `package.module:function` of yours, called
            with the inputs and labels that come, the day and the device's number; returns inputs and
            labels, perhaps fewer.
        day: the first such day; the run begins with day 1.
        share: of the devices, drawn by the run's seed.
    """

    kind: str
    day: Annotated[int, Meta(ge=1, le=MAX_NUMBER)]
    share: Annotated[float, Meta(gt=0, le=1)] = 1.0


class Arrivals(Settings, frozen=True):
    """[data.arrivals] Simulated devices whose data grow: each keeps what comes as a real one does
    (docs/streams.md), and what it serves is judged on each day's samples before they may be trained on.

    A device's part of the data set (`data.partition`) comes in an order drawn by the run's seed; what was cut
    from a series keeps its own order.

    Attributes:
        first: samples that a device has when the run begins.
        per_day: that come to it in a day; None: what is left of its part, evenly over `fleet.days`.
        times_a_day: how often some of them come.
        keep: what it keeps, the keys of `edge-agent run --keep-...`, e.g. { keep_days = 7, keep = "newest" }.
        change: see there; None: samples stay as they are.
    """

    first: Count = 100
    per_day: Positive | None = None
    times_a_day: Annotated[int, Meta(ge=1, le=1440)] = 24
    keep: dict[str, Any] = field(default_factory=dict)
    change: Change | None = None


class WirelessSection(Settings, frozen=True):
    """[fleet.wireless] One radio cell around the coordinator; the defaults are the KAPC paper's Table 4.

    Attributes:
        bandwidth_mhz, power_dbm, distance_m: of a device, drawn uniformly between the two.
        server_bandwidth_mhz, server_power_dbm: of the coordinator's transmitter.
        gain_db: of the path at 1 m.
        path_loss_exponent: of the path beyond.
        noise_dbm_hz: thermal noise power density.
        uplink_interference_db, downlink_interference_db: mean and standard deviation of what other cells
            add to the noise. The paper gives no unit; decibels are our choice.
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
    """[fleet] The simulated fleet (and the demo's). `serve` heeds `ratios` of it, and names what else is set.

    Attributes:
        devices: how many; left out, one for each group where `data.partition.kind` is `group`.
        boards: board name = how many; the rest, or all without it, are `generic`.
        uplink_mbps, downlink_mbps: instead of the boards' own links.
        links: preset or trace file (`4g`, `my-trace.csv`; `edge-sim link presets` lists them) = how many
            devices are on such a link, in the order of the devices; the rest keep the link they have
            without it.
        wireless: `true`, or a section `[fleet.wireless]`: devices that `links` leaves out share a radio
            cell with the coordinator.
        ratios: dealt to devices in turn, see `dealt`, instead of what each would choose, e.g. [0.2, 0.4, 0.6,
            0.8, 1.0]; a simulated device that then takes too long is late. `serve` deals them too: a real
            device runs at its own or, where its owner or its limits say so, at a smaller one.
        spread: of devices' true speeds about their boards' profiles: standard deviation of the logarithm.
        jitter: of how long a device trains from round to round: standard deviation of the logarithm.
        batteries: charge of those that have one when the run begins, drawn uniformly between the two, 0..1;
            they drain, and nobody charges them. Without it all are on the mains.
        policy: of every owner, the keys of `edge-agent run --policy`.
        availability: chance that a device is there when a round starts.
        trainer: what devices train with: `torch`; `onnx`, by the same bits as agents with ONNX Runtime, which
            takes small models less time; `fastest`: whichever a short measurement on this machine finds
            quicker, which the run keeps. They differ by rounding.
        train_on: what torch computes on, by its names: `cpu`, or cards that the workers share, e.g.
            `cuda:0,cuda:1`, `mps`. Another one rounds differently.
        precision: what torch computes the forward pass of a training step in, and its way back: `bfloat16`
            is quicker on cards and processors that have it, and rounds to 8 bits. Weights, gradients, the
            optimiser and all evaluations are `float32` whatever it says.
        at_once: devices that each worker trains at once: a step of all of them is one of torch's. For cards,
            where a small network's step is mostly waiting. It rounds differently.
        days: after so many simulated days the run ends; an open run (`run.rounds`) needs it.
        starts_at: time of day when the simulation begins, on 1 January 2026, for [schedule]; its `zone` is
            UTC unless it says otherwise.
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
    trainer: Literal["torch", "onnx", "fastest"] = "torch"
    train_on: Annotated[str, Meta(pattern=r"^[a-z]+(:[0-9]{1,3})?(,[a-z]+(:[0-9]{1,3})?)*$")] = PROCESSOR
    precision: Precision = "float32"
    at_once: Annotated[int, Meta(ge=1, le=1024)] = 1
    days: Annotated[float, Meta(gt=0, le=10_000)] | None = None
    starts_at: TimeOfDay = "00:00"

    @property
    def cards(self) -> tuple[str, ...]:
        """Of `train_on`; none: the processor trains."""
        return () if self.train_on == PROCESSOR else tuple(self.train_on.split(","))

    def trains_on(self, worker: int) -> str:
        """What a worker's devices train on, by the worker's number."""
        cards = self.cards or (PROCESSOR,)
        return cards[worker % len(cards)]

    def dealt(self, device: str) -> float | None:
        """The ratio of a device, by its name alone: a restart, or who comes first, changes nothing.

        A name that ends in a number has its turn by that number: `device-07` is the eighth. Any other name
        has one by its checksum. None: no ratios are dealt.
        """
        if not self.ratios:
            return None
        number = re.search(r"[0-9]+$", device)
        turn = int(number.group()) if number else zlib.crc32(device.encode())
        return self.ratios[turn % len(self.ratios)]


class PaperSection(Settings, frozen=True):
    """[paper] The cell of a paper's table that the file repeats, for `edge-sim paper`. A run ignores it.

    Attributes:
        table: of which paper, and where in it.
        value, deviation: the paper's number and its standard deviation, in the measure's unit (accuracies are
            fractions); None: it gives none.
        meaning: what the paper says its number is.
        accuracy: which of our measures that is, an accuracy or what travels, see `tools.papers.measures`.
        samples: that the whole data set has; a source with fewer makes a scaled run.
        cpu_minutes: of one seed on one core, about.
        scaled: what the file itself has smaller than the paper.
        open: what the paper leaves open: a key of this file, or of one of its sections, and why it is our
            choice. Such a key may be changed without scaling the run.
        rows: other cells of the same table, by name: the sections and keys in which they differ from this
            file, [paper] among them. A `method` of another name replaces the file's.
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
