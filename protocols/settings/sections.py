"""run.toml: everything needed to repeat a run, section by section; `protocols.settings.run_toml` reads it.

The parts a device needs travel to it in its enrolment.
"""

import math
import re
import zlib
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from fleetune.protocols.bounds import MAX_NUMBER, FleetName, Int64, NonNegative, Positive, Share
from fleetune.protocols.model.input_scaling import Mean, Std

Fraction = Annotated[float, Meta(ge=0, lt=1)]
Count = Annotated[int, Meta(ge=1, le=MAX_NUMBER)]
Factor = Annotated[float, Meta(ge=1, le=1000)]
Decibels = Annotated[float, Meta(ge=-500, le=500)]
Deviation = Annotated[float, Meta(ge=0, le=100)]  # in decibels
Metres = Annotated[float, Meta(ge=1, le=1e9)]
Megahertz = Annotated[float, Meta(ge=1e-6, le=1e6)]
Rate = Annotated[float, Meta(ge=1e-6, le=1e9)]  # Mbit/s
MOST_INPUTS = 2**26  # numbers in one sample
Name = FleetName


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the sections: immutable, and a misspelt key is an error."""


class RunSection(Settings, frozen=True):
    """[run]

    Attributes:
        name: also the fleet's name and the folder in `runs/`.
        seed: of every draw of the run.
        rounds: at most this many.
        final_evaluation: after the last round every device does one more round's work on a copy, so that
            accuracy before and after local training is known for all of them.
    """

    name: Name
    seed: Int64 = 0
    rounds: Count = 10
    final_evaluation: bool = field(default=True, name="rehearsal")


class ModelSection(Settings, frozen=True):
    """[model]

    Attributes:
        name: of a built-in model, `package.module:function` that returns a torch module from
            (input_shape, num_classes), or `bundle:FILE` that `edge-coordinator export` wrote.
        input_shape: of one sample, e.g. [1, 28, 28]; None: as data.source has it.
        num_classes: None: as data.source has it.
        weights: what the run starts from: `run:NAME`, the shared model of another run in the same folder of
            runs, or a safetensors file; None: weights drawn with the run's seed.
        init: how they are drawn: `default`, as torch does; or `kaiming`: convolutions normal with variance
            2 / fan out (He et al. 2015, torchvision), the rest as by default; the same bits without torch.
    """

    name: str
    input_shape: tuple[Count, ...] | None = None
    num_classes: Annotated[int, Meta(ge=2, le=100_000)] | None = None
    weights: str | None = None
    init: Literal["default", "kaiming"] = "default"

    def __post_init__(self) -> None:
        if self.input_shape is not None and math.prod(self.input_shape) > MOST_INPUTS:
            raise ValueError(f"input_shape has more than {MOST_INPUTS:,} numbers in a sample")


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


class DataSection(Settings, frozen=True):
    """[data]

    Attributes:
        source: `digits`, `idx:FOLDER`, `cifar:FOLDER`, `har:FOLDER`, `npz:FILE` or
            `package.module:function`.
        partition: for simulations; a real device brings its own data.
        mean, std: float input = (x / 255 if x is uint8 else x) minus mean, over std; each one number, or a
            list with a number for each channel, e.g. mean = [0.4914, 0.4822, 0.4465].
        validation_fraction: of the training samples, held out for methods that need a validation loss.
        class_names: of the labels 0, 1, ...; for the models that devices export.
    """

    source: str = "digits"
    partition: Partition = Partition()
    mean: Mean = 0.0
    std: Std = 1.0
    validation_fraction: Fraction = 0.0
    class_names: tuple[str, ...] = ()


class TrainingSection(Settings, frozen=True):
    """[training] Plain SGD: v = momentum * v + g + weight_decay * w; w -= learning_rate * v.

    Attributes:
        epochs: passes over a device's training samples in a round; a method may have its own.
        batch_size: samples a step; the last batch of an epoch is smaller, or larger by one.
        learning_rate: of every step; a method may have rates of its own beside it.
        momentum: of v, which begins at zero in every round.
        weight_decay: added to the gradient, as in torch's SGD.
    """

    epochs: Count = 1
    batch_size: Count = 32
    learning_rate: Positive = 0.05
    momentum: Fraction = 0.0
    weight_decay: NonNegative = 0.0


class RoundSection(Settings, frozen=True):
    """[round]

    Attributes:
        participants: devices a round; None: all that are there.
        over_selection: ask this many times as many; the round closes when `participants` replied.
        deadline_s: a round closes at the latest after this.
        deadline: `fixed`, every round's is `deadline_s`; or `predicted`: what those that are asked expect of
            the round says when enough of them should have replied, and it closes at the latest after
            `deadline_slack` times that, but never later than `deadline_s` nor sooner than a second.
        deadline_slack: see `deadline`.
        prefer: `any` device that is there is drawn alike; or `able`: those that expect a round longer than
            `deadline_s`, say that their link is metered, or run on a battery below `min_battery` are asked
            only when too few others are there for `participants` (without it for `quorum`).
        min_battery: charge, 0..1, see `prefer`.
        quorum: fewer updates at the deadline: the round is tried again, nothing is aggregated.
        start_with: devices to wait for before round 1; a simulation whose devices are always there waits for
            all that take part.
        mode: `synchronous`; or semi-asynchronous, where an aggregation counts as a round and `participants`
            is how many devices work at a time: `window` aggregates what arrived every `window_s`, `buffer`
            as soon as `buffer` updates are in.
        window_s: of a window, at most `deadline_s`.
        buffer: updates an aggregation.
        staleness_power: an update that was planned s aggregations ago weighs 1 / (1 + s) ** staleness_power.
        max_staleness: with a greater s it is refused.
        max_strain: an update whose largest or RMS value is more than this many times that of the shared model
            and of the other updates is turned away as if its device had declined; 0: none is.
        max_samples: a device that says it holds more training samples may not take part: they are its weight.
    """

    participants: Count | None = None
    over_selection: Factor = 1.0
    deadline_s: Positive = 600.0
    deadline: Literal["fixed", "predicted"] = "fixed"
    deadline_slack: Factor = 1.5
    prefer: Literal["any", "able"] = "any"
    min_battery: Annotated[float, Meta(ge=0, le=1)] = 0.2
    quorum: Count = 1
    start_with: Count = 1
    mode: Literal["synchronous", "window", "buffer"] = "synchronous"
    window_s: Positive | None = None
    buffer: Count | None = None
    staleness_power: NonNegative = 0.5
    max_staleness: Annotated[int, Meta(ge=0, le=MAX_NUMBER)] = 20
    max_strain: NonNegative = 100.0
    max_samples: Count = 10_000_000

    def __post_init__(self) -> None:
        at_most = None if self.mode != "synchronous" else self.participants
        if at_most is not None and self.quorum > at_most:
            raise ValueError(f"quorum = {self.quorum} is more than participants = {at_most}")
        for key, mode in (("window_s", "window"), ("buffer", "buffer")):
            value = getattr(self, key)
            if (self.mode == mode) != (value is not None):
                verb = "is missing: it belongs to" if value is None else "only goes with"
                raise ValueError(f'{key} {verb} mode = "{mode}"')
        if self.window_s is not None and self.window_s > self.deadline_s:
            raise ValueError(f"window_s = {self.window_s:g} is longer than deadline_s = {self.deadline_s:g}")
        if self.mode != "synchronous" and self.over_selection != 1:
            raise ValueError(f'over_selection is for mode = "synchronous"; with "{self.mode}" leave it out')
        if self.mode != "synchronous" and self.deadline != "fixed":
            raise ValueError(f'deadline = "{self.deadline}" is for mode = "synchronous", not "{self.mode}"')


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
        devices: how many.
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
        batteries: charge of those that have one when the run begins, drawn uniformly between the two, 0..1;
            they drain, and nobody charges them. Without it all are on the mains.
        policy: of every owner, the keys of `edge-agent run --policy`.
        availability: chance that a device is there when a round starts.
    """

    devices: Annotated[int, Meta(ge=1, le=1_000_000)] = 10
    boards: dict[str, Annotated[int, Meta(ge=0, le=MAX_NUMBER)]] = {}
    uplink_mbps: Rate | None = None
    downlink_mbps: Rate | None = None
    links: dict[str, Annotated[int, Meta(ge=0, le=MAX_NUMBER)]] = {}
    wireless: WirelessSection | bool = False
    ratios: tuple[Annotated[float, Meta(gt=0, le=1)], ...] = ()
    spread: Annotated[float, Meta(ge=0, le=1)] = 0.0
    batteries: tuple[Share, Share] | None = None
    policy: dict[str, Any] = {}
    availability: Annotated[float, Meta(gt=0, le=1)] = 1.0

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
        value, deviation: the paper's number and its standard deviation, fractions; None: it gives none.
        meaning: what the paper says its accuracy is.
        accuracy: which of our measures that is, see `tools.papers.accuracies`.
        samples: that the whole data set has; a source with fewer makes a scaled run.
        cpu_minutes: of one seed on one core, about.
        scaled: what the file itself has smaller than the paper.
        open: what the paper leaves open: a key of this file, or of one of its sections, and why it is our
            choice. Such a key may be changed without scaling the run.
    """

    table: str
    value: Fraction
    meaning: str
    accuracy: str
    samples: Count
    cpu_minutes: Positive
    deviation: NonNegative | None = None
    scaled: tuple[str, ...] = ()
    open: dict[str, str] = {}


class RunSettings(Settings, frozen=True):
    """A whole run.toml.

    Attributes:
        compare: [compare.LABEL] tables for `edge-sim compare`: what [method] would hold for the contender
            LABEL; without a `name` LABEL is the method; `ratios` goes to [fleet] instead. A run ignores them.
        paper: see `PaperSection`.
    """

    run: RunSection
    model: ModelSection
    method: dict[str, Any]
    data: DataSection = DataSection()
    training: TrainingSection = TrainingSection()
    round: RoundSection = RoundSection()
    fleet: FleetSection = FleetSection()
    compare: dict[Name, dict[str, Any]] = {}
    paper: PaperSection | None = None


def simulated_keys(settings: RunSettings) -> list[str]:
    """What a run.toml says about a simulated world, and a real fleet brings itself: `serve` names these keys,
    and nothing else in the file but [compare] and [paper] means less to it than to a simulation.
    """
    fleet, plain = settings.fleet, FleetSection()
    keys = [key for key in fleet.__struct_fields__ if key != "ratios"]
    said = [f"fleet.{key}" for key in keys if getattr(fleet, key) != getattr(plain, key)]
    return said + ["data.partition"] * (settings.data.partition != Partition())
