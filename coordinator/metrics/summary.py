"""summary.json: what a run came to, for scripts, tables and plots; `summarise` makes it.

Scripts read it by its keys. Whoever changes a key, or what it means, raises `FORMAT`.
"""

from collections.abc import Collection
from pathlib import Path

from msgspec import UNSET, MsgspecError, Struct, UnsetType, field, json
from msgspec.structs import replace

from fleetune.coordinator.metrics.averages import mean, weighted_mean
from fleetune.protocols.errors import StoreError, StoreVersion
from fleetune.protocols.tasks.scores import ACCURACY, Score

SUMMARY = "summary.json"
FORMAT = 2
_REMEDY = "read it with the version of fleetune that wrote it, or run the run again"
ONE_SIDED_95 = 1.645  # standard errors of a normal mean


class BestRound(Struct, frozen=True):
    """The round whose participants' personal models did best; of equal ones the earliest."""

    round: int
    after_mean: float


class Accuracies(Struct, frozen=True):
    """Accuracies, or whatever score the task has, on the devices' own test samples, as a mean over devices
    and weighted by training samples.

    Attributes:
        personal_mean, personal_weighted: each device's personal model as it stood after the last round, of
            the devices that took part: the others have a model that was never trained.
        before_mean, before_weighted: in the final evaluation, of the model local training starts from.
        after_mean, after_weighted: in the final evaluation, of the personal model that it leads to.
        deployed_mean, deployed_weighted: of the model that the device deploys, the best or newest of the run
            (docs/personal-models.md).
        best_round: see there.
        personal_mean_all, personal_weighted_all: of all devices; not there where all took part.
        validation_mean: as `personal_mean`, on the devices' validation samples; not there without any.
    """

    personal_mean: float | None = None
    personal_weighted: float | None = None
    before_mean: float | None = None
    before_weighted: float | None = None
    after_mean: float | None = None
    after_weighted: float | None = None
    deployed_mean: float | None = None
    deployed_weighted: float | None = None
    best_round: BestRound | None = None
    personal_mean_all: float | UnsetType | None = UNSET
    personal_weighted_all: float | UnsetType | None = UNSET
    validation_mean: float | UnsetType = UNSET


class PayloadBytes(Struct, frozen=True):
    """Payload bytes of all devices, as counted where they were sent and received.

    Attributes:
        up, down: of the training rounds.
        up_dense, down_dense: as many whole models in float32.
        up_paper, down_paper: of training as papers count them, see `protocols.update.paper_bytes`.
        enrolment: what joining took, both ways.
        final_evaluation_up, final_evaluation_down: of the final evaluation, in no other figure.
    """

    up: int = 0
    down: int = 0
    up_dense: int = 0
    down_dense: int = 0
    up_paper: int = 0
    down_paper: int = 0
    enrolment: int = 0
    final_evaluation_up: int = 0
    final_evaluation_down: int = 0

    @property
    def share_up(self) -> float | None:
        """Relative to as many whole models; None: none was sent."""
        return self.up / self.up_dense if self.up_dense else None

    @property
    def share_down(self) -> float | None:
        """Relative to as many whole models; None: none was sent."""
        return self.down / self.down_dense if self.down_dense else None


class Seconds(Struct, frozen=True):
    """Times; those of a simulation are of its virtual clock.

    Attributes:
        wall: of a real fleet, from the run's begin to its end; None: it has not ended, or was simulated.
        rounds: until the last training round closed.
        train, up, down: of all devices together.
        virtual: of a simulation, from its begin to its end on the virtual clock. What it took of a processor
            is `Provenance.processor_s`.
    """

    wall: float | None = None
    rounds: float | None = None
    train: float | None = None
    up: float | None = None
    down: float | None = None
    virtual: float | UnsetType = UNSET


class Host(Struct, frozen=True):
    """What kind of computer the coordinator or simulation ran on.

    Attributes:
        system, machine: e.g. Linux, x86_64.
        processor: its model, e.g. Intel(R) Xeon(R) Platinum 8370C CPU @ 2.80GHz; "": unknown.
        cores: that it has.
    """

    system: str = ""
    machine: str = ""
    processor: str = ""
    cores: int | None = None


class Provenance(Struct, frozen=True):
    """What a run was made with.

    Attributes:
        versions: of Fleetune, Python, torch, NumPy and ONNX Runtime, as far as they are installed.
        commits: of the folder it was started in (`folder`), and of Fleetune (`fleetune`), where these are git
            trees; `-dirty` behind one says that files had been edited since.
        host: see there.
        sources: a digest of each file of the user's code that its settings name, see `user_sources`.
        processor_s: processor time that the coordinator, or the simulation with its workers, took; a process
            that was killed is not in it.
    """

    versions: dict[str, str] = field(default_factory=dict)
    commits: dict[str, str] = field(default_factory=dict)
    host: Host = Host()
    sources: dict[str, str] = field(default_factory=dict)
    processor_s: float | None = None


class Errors(Struct, frozen=True):
    """Relative errors of predictions: of how many replies, their median, and what a tenth of them reaches."""

    pairs: int = 0
    median: float | None = None
    worst_decile: float | None = None


class PredictionErrors(Struct, frozen=True):
    """Of all replies, and of those after the first five rounds of each device; None: there are none."""

    overall: Errors | None = None
    after_five_rounds: Errors | None = None


class DiagnosticHistory(Struct, frozen=True, omit_defaults=True):
    """One figure of a method's inner workings over a run (`protocols.method.diagnostics`).

    The lists go together: an entry for each training round that tells it; in a long run for several rounds on
    end, then the means are over these, and `least` and `greatest` of all of them.

    Attributes:
        title, about, unit, of, by: as the method declares it.
        value: over the run: the mean over all updates, or the state's after the last round.
        rounds: their numbers, the last of several.
        mean: over the devices' updates, and over parts where it has them.
        least, greatest: of any device and part.
        parts: by part, its mean over the devices; None where it was not told.
    """

    title: str
    about: str
    unit: str
    of: str
    by: str | None
    value: float
    rounds: list[int]
    mean: list[float]
    least: list[float]
    greatest: list[float]
    parts: dict[str, list[float | None]] = field(default_factory=dict)

    @property
    def last_parts(self) -> dict[str, float]:
        """The last reported value of each part."""
        reported = {
            part: [value for value in values if value is not None] for part, values in self.parts.items()
        }
        return {part: values[-1] for part, values in reported.items() if values}


class DeviceAdoption(Struct, frozen=True, omit_defaults=True):
    """What a device deploys in a run with [adoption], by its latest reply or the final evaluation.

    Attributes:
        adopted: whether that is a model of the fleet instead of its local-only model.
        local_only: accuracy of its local-only model.
        gain: how much better the deployed model is than the local-only one, on the same test samples.
        gain_error: standard error of `gain`.
    """

    adopted: bool
    local_only: float | None = None
    gain: float | None = None
    gain_error: float | None = None

    @property
    def below(self) -> bool:
        """Whether it is worse than local-only by more than the noise of its tests (one-sided 95 %)."""
        return self.gain is not None and self.gain < -ONE_SIDED_95 * (self.gain_error or 0.0)


class AdoptionSummary(Struct, frozen=True, omit_defaults=True):
    """What all devices deploy in a run with [adoption].

    Attributes:
        devices: that report it.
        adopted: of these, devices that deploy a model of the fleet.
        below: devices whose deployed model is worse than local-only by more than the noise of their tests.
        gain: over local-only, mean over devices.
        low, high: 95 % interval of that mean, by how devices differ.
    """

    devices: int
    adopted: int
    below: int
    gain: float | None = None
    low: float | None = None
    high: float | None = None


class RolloutSummary(Struct, frozen=True, omit_defaults=True):
    """The versions of the shared model in a run with adoption.canary, numbered by their rounds.

    Attributes:
        approved: the version that all devices get; 0: none.
        trial: the version on trial; 0: none.
        canaries, reporting: devices that try it, and how many of them reported on it.
        went_out, stopped: versions that all devices got, and that were stopped, over the whole run.
        why: reasons of the latest that were stopped, a line each.
    """

    approved: int
    trial: int
    canaries: int
    reporting: int
    went_out: int
    stopped: int
    why: tuple[str, ...] = ()


class DeviceSummary(Struct, frozen=True):
    """What a run came to for one device.

    Attributes:
        ratio: of its latest reply.
        num_samples: that it trains on.
        personal, before, after, deployed: accuracies as in `Accuracies`.
        up, down: payload bytes of the training rounds.
        updates: that it sent.
        reason: why it took its latest ratio.
        predicted_s, actual_s: of a round, medians over its training rounds.
        joules: of its training rounds.
        adoption: see there; in runs with [adoption].
        scores: all scores of the run's task, of the personal model; not there in runs without a [task].
        metrics: those that have no key of their own: of `metrics.METRICS`, where there are none today, and
            `method.NAME`, the figures of the method's inner workings in its updates, means over its rounds.
        validation: of the personal model, on the validation samples; not there without any.
        group: of the data, that it has; in simulations of `data.partition.kind = "group"`.
    """

    ratio: float | None = None
    num_samples: int | None = None
    personal: float | None = None
    before: float | None = None
    after: float | None = None
    deployed: float | None = None
    up: int = 0
    down: int = 0
    updates: int = 0
    reason: str | None = None
    predicted_s: float | None = None
    actual_s: float | None = None
    joules: float | None = None
    adoption: DeviceAdoption | UnsetType = UNSET
    metrics: dict[str, float | None] | UnsetType = UNSET
    scores: dict[str, float] | UnsetType = UNSET
    validation: float | UnsetType = UNSET
    group: str | UnsetType = UNSET

    @property
    def took_part(self) -> bool:
        """Whether it sent an update that counted."""
        return self.updates > 0


class DaySummary(Struct, frozen=True, omit_defaults=True):
    """A day of a simulation whose devices' data grow.

    Attributes:
        day: from 1.
        score: of what devices served, on the samples that came that day, judged before they were kept; mean
            over the devices that served a model of the run; None: there were none.
        rounds, joules, up, down: closed, taken by rounds, and sent, until the day's end.
        drifting: devices that told of drift then.
        devices: each one's own score.
    """

    day: int
    score: float | None
    rounds: int = 0
    joules: float = 0.0
    up: int = 0
    down: int = 0
    drifting: int = 0
    devices: dict[str, float] = field(default_factory=dict)


class RatioSummary(Struct, frozen=True, kw_only=True):
    """What working at a ratio took and brought; None: not known.

    Attributes:
        ratio: which.
        replies: made at it.
        seconds, up, joules: medians of these, of whole rounds, payload bytes and energy.
        local_work: mean share of the local training that was done.
    """

    ratio: float
    replies: int
    seconds: float | None = None
    up: float | None = None
    joules: float | None = None
    local_work: float = 1.0


class EncodingSummary(Struct, frozen=True):
    """What was sent by an encoding.

    Attributes:
        encoding: which, with the settings that run.toml gives it.
        replies: whose updates were asked for by it.
        up: median of their payload bytes.
    """

    encoding: str
    replies: int
    up: float


class Summary(Struct, frozen=True, kw_only=True):
    """The content of summary.json. What does not apply or is not known is None.

    Attributes:
        format: version of the file's format.
        method, model, seed: of the run.
        parameters: of the model.
        rounds: closed training rounds.
        devices: that took anything from the coordinator.
        simulated: times are of a virtual clock.
        accuracy, bytes, seconds: see there. A run that is judged by another score has no accuracy.
        ratios: by device, of each of its training rounds.
        joules: of all training rounds' replies that tell them.
        predicted_vs_actual: by quantity; None: nobody predicted anything.
        refused: how often what was refused, by kind.
        refused_by_device: how many replies of a device were refused, by kind.
        by_device: see `DeviceSummary`.
        adoption: see there; in runs with [adoption].
        rollout: see there; in runs with adoption.canary.
        metrics: those that have no key of their own, see `metrics.METRICS`; there are none today.
        diagnostics: by name, what the method tells of its inner workings; not there where it tells nothing.
        downsampled: rounds whose records an open run has let go of. All sums count them; no median, list
            or picture does. Not there where there are none.
        score: by which the run's models are judged; not there where it is accuracy.
        scored: what `accuracy` is where it is accuracy.
        scores: all scores of the run's task, of the personal models, means over devices.
        days: of a simulation whose devices' data grow (`data.arrivals`).
        ended: why training is over; not there where it is not, or all rounds are done.
        by_ratio: ascending; in runs whose coordinator proposes ratios.
        by_encoding: those of most bytes first; in runs whose coordinator proposes encodings.
        agents: devices by program and version of their agent, as it reports them; not in simulations.
        provenance: see there.
    """

    format: int = FORMAT
    method: str
    model: str = ""
    parameters: int = 0
    rounds: int = 0
    devices: int = 0
    seed: int = 0
    simulated: bool = False
    accuracy: Accuracies = Accuracies()
    bytes: PayloadBytes = PayloadBytes()
    seconds: Seconds = Seconds()
    ratios: dict[str, list[float]] = field(default_factory=dict)
    joules: float | None = None
    predicted_vs_actual: dict[str, PredictionErrors | None] | None = None
    refused: dict[str, int] = field(default_factory=dict)
    refused_by_device: dict[str, dict[str, int]] = field(default_factory=dict)
    by_device: dict[str, DeviceSummary] = field(default_factory=dict)
    adoption: AdoptionSummary | UnsetType = UNSET
    metrics: dict[str, float | None] | UnsetType = UNSET
    diagnostics: dict[str, DiagnosticHistory] | UnsetType = UNSET
    downsampled: int | UnsetType = UNSET
    score: Score | UnsetType = UNSET
    scored: Accuracies | UnsetType = UNSET
    scores: dict[str, float | None] | UnsetType = UNSET
    rollout: RolloutSummary | UnsetType = UNSET
    days: list[DaySummary] | UnsetType = UNSET
    ended: str | UnsetType = UNSET
    by_ratio: list[RatioSummary] | UnsetType = UNSET
    by_encoding: list[EncodingSummary] | UnsetType = UNSET
    agents: dict[str, int] | UnsetType = UNSET
    provenance: Provenance | UnsetType = UNSET

    @property
    def judged_by(self) -> Score:
        """The score by which the run's models are judged."""
        return ACCURACY if self.score is UNSET else self.score

    @property
    def judged(self) -> Accuracies:
        """What the models came to by that score."""
        return self.accuracy if self.scored is UNSET else self.scored

    def with_judged(self, judged: Accuracies) -> "Summary":
        """With other figures by that score."""
        return replace(self, accuracy=judged) if self.scored is UNSET else replace(self, scored=judged)

    @property
    def ranked(self) -> list[float]:
        """The personal scores of the devices that took part, the worst first."""
        rows = self.by_device.values()
        own = (row.personal for row in rows if row.took_part and row.personal is not None)
        return sorted(own, reverse=self.judged_by.better == "lower")

    @property
    def who_took_part(self) -> str:
        """How many devices took part, in words; "": all did."""
        taking = sum(row.took_part for row in self.by_device.values())
        count = len(self.by_device)
        return "" if taking == count else f"{taking} of {count} devices took part"

    @property
    def diagnostics_by_name(self) -> dict[str, DiagnosticHistory]:
        """What the method tells of its inner workings, by name."""
        return self.diagnostics if isinstance(self.diagnostics, dict) else {}


class _Format(Struct):
    """All that is read of a file before its format is known."""

    format: int = 0


def encoded(summary: Summary) -> bytes:
    """The content of summary.json."""
    return json.format(json.encode(summary), indent=2) + b"\n"


def read_summary(folder: Path | str) -> Summary:
    """What the run in `folder` came to.

    Raises:
        StoreError: there is no summary.json in it, or it is damaged.
        StoreVersion: it has another format.
    """
    path = Path(folder) / SUMMARY
    try:
        data = path.read_bytes()
        found = json.decode(data, type=_Format).format
        if found != FORMAT:
            raise StoreVersion.of(path, found, FORMAT, _REMEDY)
        return json.decode(data, type=Summary)
    except OSError as problem:
        raise StoreError(f"{folder} holds no summary of a run: {problem.strerror}") from None
    except MsgspecError as problem:
        raise StoreError(f"{path} is damaged: {problem}") from None


def over_participants(judged: Accuracies, rows: Collection[DeviceSummary]) -> Accuracies:
    """Scores whose personal ones are means over all devices, with the means over those that took part;
    unchanged where all did.
    """
    untrained = any(row.personal is not None and not row.took_part for row in rows)
    if not untrained or judged.personal_mean is None:
        return judged
    taking = [row for row in rows if row.took_part]
    return replace(
        judged,
        personal_mean=mean(row.personal for row in taking),
        personal_weighted=weighted_mean((row.personal, row.num_samples or 0) for row in taking),
        personal_mean_all=judged.personal_mean,
        personal_weighted_all=judged.personal_weighted,
    )
