"""summary.json: the results of a run, for scripts, tables and plots. `summarise` makes the file.

Scripts read values by key. A change of a key or of its meaning requires a higher `FORMAT`.
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
ONE_SIDED_95 = 1.645  # one-sided 95 % quantile of the normal distribution, in standard errors


class BestRound(Struct, frozen=True):
    """The round whose participants' personal models had the best mean score; the earliest if several are
    equal.
    """

    round: int
    after_mean: float


class Accuracies(Struct, frozen=True):
    """Scores on the devices' own test samples, as means over devices and weighted by training samples.

    The score is accuracy unless the run's task has another one.

    Attributes:
        personal_mean, personal_weighted: score of each device's personal model after the last round, over the
            devices that took part; other devices never trained a personal model.
        before_mean, before_weighted: score in the final evaluation of the model that local training starts
            from.
        after_mean, after_weighted: score in the final evaluation of the personal model after local training.
        deployed_mean, deployed_weighted: score of the model that the device deploys, the best or newest of
            the run (docs/personal-models.md).
        best_round: see `BestRound`.
        personal_mean_all, personal_weighted_all: personal score over all devices; omitted if all took part.
        validation_mean: like `personal_mean`, on the devices' validation samples; omitted if there are none.
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
        up, down: bytes of the training rounds.
        up_dense, down_dense: bytes of the same number of whole models in float32.
        up_paper, down_paper: bytes of training as papers count them, see `protocols.update.paper_bytes`.
        enrolment: bytes transferred while devices joined, in both directions.
        final_evaluation_up, final_evaluation_down: bytes of the final evaluation; no other figure includes
            them.
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
        """Bytes sent up relative to the same number of whole float32 models; None if no model was sent."""
        return self.up / self.up_dense if self.up_dense else None

    @property
    def share_down(self) -> float | None:
        """Bytes sent down relative to the same number of whole float32 models; None if no model was sent."""
        return self.down / self.down_dense if self.down_dense else None


class Seconds(Struct, frozen=True):
    """Times in seconds; in a simulation they are of its virtual clock.

    Attributes:
        wall: duration of a real run from begin to end; None if it has not ended or was simulated.
        rounds: time until the last training round closed.
        train, up, down: times for training, uploads and downloads, summed over all devices.
        virtual: duration of a simulated run on the virtual clock. `Provenance.processor_s` is the processor
            time that the simulation took.
    """

    wall: float | None = None
    rounds: float | None = None
    train: float | None = None
    up: float | None = None
    down: float | None = None
    virtual: float | UnsetType = UNSET


class Host(Struct, frozen=True):
    """The kind of computer on which the coordinator or simulation ran.

    Attributes:
        system, machine: e.g. Linux, x86_64.
        processor: model of the processor, e.g. Intel(R) Xeon(R) Platinum 8370C CPU @ 2.80GHz; "" if unknown.
        cores: number of processor cores.
    """

    system: str = ""
    machine: str = ""
    processor: str = ""
    cores: int | None = None


class Provenance(Struct, frozen=True):
    """The software, code and hardware that produced a run.

    Attributes:
        versions: versions of Fleetune, Python, torch, NumPy and ONNX Runtime, if installed.
        commits: git commits of the working folder (`folder`) and of Fleetune (`fleetune`), if these are git
            trees; the suffix `-dirty` marks uncommitted changes.
        host: see `Host`.
        sources: digest of each file of the user's code that the settings name, see `user_sources`.
        processor_s: processor time of the coordinator, or of the simulation and its workers; killed processes
            are not counted.
    """

    versions: dict[str, str] = field(default_factory=dict)
    commits: dict[str, str] = field(default_factory=dict)
    host: Host = Host()
    sources: dict[str, str] = field(default_factory=dict)
    processor_s: float | None = None


class Errors(Struct, frozen=True):
    """Relative errors of predictions: number of replies, median, and 90th percentile."""

    pairs: int = 0
    median: float | None = None
    worst_decile: float | None = None


class PredictionErrors(Struct, frozen=True):
    """Errors over all replies, and over those after each device's first five rounds; None if there are
    none.
    """

    overall: Errors | None = None
    after_five_rounds: Errors | None = None


class DiagnosticHistory(Struct, frozen=True, omit_defaults=True):
    """How one diagnostic of a method developed over a run (`protocols.method.diagnostics`).

    All lists have the same length: one entry for each training round that reports the diagnostic. In a long
    run,
    an entry covers several consecutive rounds: the mean of their means, and their least and greatest value.

    Attributes:
        title, about, unit, of, by: as the method declares them.
        value: the mean over all updates of the run, or the value of the state after the last round.
        rounds: number of each entry's round; the last one if it covers several.
        mean: mean over the devices' updates, and over parts if there are any.
        least, greatest: smallest and largest value of any device and part.
        parts: for each part its mean over the devices; None where it was not reported.
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


class DeviceAdoption(Struct, frozen=True, omit_defaults=True):
    """The model that a device deploys in a run with [adoption], by its latest reply or the final evaluation.

    Attributes:
        adopted: True if it deploys a model of the fleet instead of its local-only model.
        local_only: accuracy of its local-only model.
        gain: score gain of the deployed model over the local-only model, on the same test samples.
        gain_error: standard error of `gain`.
    """

    adopted: bool
    local_only: float | None = None
    gain: float | None = None
    gain_error: float | None = None

    @property
    def below(self) -> bool:
        """True if the deployed model is worse than local-only by more than the test noise (one-sided 95
        %).
        """
        return self.gain is not None and self.gain < -ONE_SIDED_95 * (self.gain_error or 0.0)


class AdoptionSummary(Struct, frozen=True, omit_defaults=True):
    """The models that all devices deploy in a run with [adoption].

    Attributes:
        devices: number of devices that report it.
        adopted: number of these that deploy a model of the fleet.
        below: number of devices whose deployed model is worse than local-only by more than the test noise.
        gain: gain over local-only, mean over devices.
        low, high: interval of that mean (one-sided 95 % at each end), from the variation between devices.
    """

    devices: int
    adopted: int
    below: int
    gain: float | None = None
    low: float | None = None
    high: float | None = None


class RolloutSummary(Struct, frozen=True, omit_defaults=True):
    """Versions of the shared model in a run with adoption.canary. A version's number is that of its round.

    Attributes:
        approved: the version that all devices get; 0 if there is none.
        trial: the version on trial; 0 if there is none.
        canaries, reporting: number of devices that test the trial version, and how many of them have reported
            on it.
        went_out, stopped: numbers of versions that were released to all devices and that were stopped, over
            the run.
        why: reasons of the latest stopped versions, one line each.
    """

    approved: int
    trial: int
    canaries: int
    reporting: int
    went_out: int
    stopped: int
    why: tuple[str, ...] = ()


class PrivacySummary(Struct, frozen=True):
    """What a run with [privacy] has spent (docs/differential-privacy.md).

    Attributes:
        epsilon: the largest epsilon of any device, tasks of an open round included.
        delta: probability with which this bound may fail.
        max_epsilon: limit of epsilon; None without one.
        tasks, most_tasks: training tasks of the device that was asked most often, and the largest number
            within `max_epsilon`; None without a limit.
        noise: "central" or "local".
        clip, noise_multiplier: as in [privacy].
        scores: True if devices also send losses and scores, which are outside epsilon.
    """

    epsilon: float
    delta: float
    max_epsilon: float | None
    tasks: int
    most_tasks: int | None
    noise: str
    clip: float
    noise_multiplier: float
    scores: bool

    @property
    def words(self) -> str:
        """The spent budget in one line."""
        limit = "" if self.max_epsilon is None else f" of {self.max_epsilon:g}"
        tasks = f"{self.tasks}" if self.most_tasks is None else f"{self.tasks} of {self.most_tasks}"
        spent = f"epsilon {self.epsilon:.3g}{limit}, delta {self.delta:g}; {tasks} tasks"
        return f"{spent}, {self.noise} noise" + (", scores outside it" if self.scores else "")


class DeviceSteps(Struct, frozen=True):
    """How a device's updates compare with those of others (docs/robust.md).

    Attributes:
        ratio: size of its steps relative to the round's median, mean over its rounds.
        cosine: of the angle to the round's median step, mean over its rounds.
        clipped: share of its rounds in which its step was clipped.
    """

    ratio: float | None = None
    cosine: float | None = None
    clipped: float | None = None


class DeviceSummary(Struct, frozen=True):
    """Results of a run for one device.

    Attributes:
        ratio: model ratio of the device's latest reply.
        num_samples: number of its training samples.
        personal, before, after, deployed: scores as in `Accuracies`.
        up, down: payload bytes of the training rounds.
        updates: number of updates that the device sent.
        reason: reason for the latest ratio.
        predicted_s, actual_s: predicted and actual duration of a round, medians over its training rounds.
        joules: energy of its training rounds.
        steps: see `DeviceSteps`; all None if the method does not combine updates.
        adoption: see `DeviceAdoption`; only in runs with [adoption].
        scores: all scores of the run's task for the personal model; omitted in runs without a [task].
        metrics: metrics without a key of their own. `method.NAME` is a diagnostic that the method reports
            with updates, as a mean over the device's rounds.
        validation: score of the personal model on the validation samples; omitted if there are none.
        group: the device's data group; only in simulations with `data.partition.kind = "group"`.
        epsilon: what its tasks have spent; only in runs with [privacy].
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
    steps: DeviceSteps = DeviceSteps()
    adoption: DeviceAdoption | UnsetType = UNSET
    metrics: dict[str, float | None] | UnsetType = UNSET
    scores: dict[str, float] | UnsetType = UNSET
    validation: float | UnsetType = UNSET
    group: str | UnsetType = UNSET
    epsilon: float | UnsetType = UNSET

    @property
    def took_part(self) -> bool:
        """True if the device sent an update that counted."""
        return self.updates > 0


class DaySummary(Struct, frozen=True, omit_defaults=True):
    """One day of a simulation in which the devices' data sets grow.

    Attributes:
        day: number of the day, from 1.
        score: score of the deployed models on the day's new samples, before these are stored. It is the mean
            over devices that deploy a model of the run; None if there are none.
        rounds, joules, up, down: totals from the start to the day's end: closed rounds, energy, payload
            bytes.
        drifting: number of devices that report drift at that time.
        devices: score of each device.
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
    """Cost and results of one model ratio; None where unknown.

    Attributes:
        ratio: the ratio.
        replies: number of replies with this ratio.
        seconds, up, joules: medians over these replies of round duration, payload bytes and energy.
        local_work: mean fraction of the requested local training that devices completed.
    """

    ratio: float
    replies: int
    seconds: float | None = None
    up: float | None = None
    joules: float | None = None
    local_work: float = 1.0


class EncodingSummary(Struct, frozen=True):
    """Replies and bytes of one update encoding.

    Attributes:
        encoding: the encoding with its settings in run.toml.
        replies: number of replies for which it was requested.
        up: median of their payload bytes.
    """

    encoding: str
    replies: int
    up: float


class Summary(Struct, frozen=True, kw_only=True):
    """The content of summary.json. A value that is unknown or does not apply is None.

    Attributes:
        format: version of the file's format.
        method, model, seed: method, model and seed of the run.
        parameters: number of parameters of the model.
        rounds: number of closed training rounds.
        devices: number of devices that received anything from the coordinator.
        simulated: True if times are of a virtual clock.
        accuracy, bytes, seconds: see `Accuracies`, `PayloadBytes` and `Seconds`. A run that is judged by
            another score has no accuracy.
        ratios: ratios of each device's training rounds, by device.
        joules: energy of all training replies that report it.
        predicted_vs_actual: errors of predictions, by quantity; None if no device predicted anything.
        refused: number of refused messages and replies, by kind.
        refused_by_device: number of refused replies of each device, by kind.
        by_device: see `DeviceSummary`.
        adoption: see `AdoptionSummary`; only in runs with [adoption].
        rollout: see `RolloutSummary`; only in runs with adoption.canary.
        metrics: metrics without a key of their own, see `metrics.METRICS`; there are none today.
        diagnostics: history of each of the method's diagnostics, by name; omitted if there are none.
        downsampled: number of rounds whose records an open-ended run has dropped. Sums include these rounds;
            medians, lists and pictures do not. Omitted if 0.
        score: score by which the run's models are judged; omitted if it is accuracy.
        scored: results by the score in `score`; replaces `accuracy`.
        scores: all scores of the run's task for the personal models, means over devices.
        days: days of a simulation in which the devices' data grow (`data.arrivals`).
        ended: reason why training is over; omitted if it is not, or if all rounds are done.
        by_ratio: figures of each ratio, ascending; only in runs whose coordinator proposes ratios.
        by_encoding: figures of each encoding, largest payload first; only in runs whose coordinator proposes
            encodings.
        agents: number of devices for each reported agent program and version; omitted in simulations.
        privacy: see `PrivacySummary`; only in runs with [privacy].
        provenance: see `Provenance`.
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
    privacy: PrivacySummary | UnsetType = UNSET

    @property
    def judged_by(self) -> Score:
        """The score by which the run's models are judged."""
        return ACCURACY if self.score is UNSET else self.score

    @property
    def judged(self) -> Accuracies:
        """Results by the score that judges the run's models."""
        return self.accuracy if self.scored is UNSET else self.scored

    def with_judged(self, judged: Accuracies) -> "Summary":
        """Return a copy with other results by the score that judges the run's models."""
        return replace(self, accuracy=judged) if self.scored is UNSET else replace(self, scored=judged)

    @property
    def ranked(self) -> list[float]:
        """Personal scores of the devices that took part, worst first."""
        rows = self.by_device.values()
        own = (row.personal for row in rows if row.took_part and row.personal is not None)
        return sorted(own, reverse=self.judged_by.better == "lower")

    @property
    def who_took_part(self) -> str:
        """Number of devices that took part, in words; "" if all devices did."""
        taking = sum(row.took_part for row in self.by_device.values())
        count = len(self.by_device)
        return "" if taking == count else f"{taking} of {count} devices took part"

    @property
    def diagnostics_by_name(self) -> dict[str, DiagnosticHistory]:
        """Histories of the method's diagnostics, by name."""
        return self.diagnostics if isinstance(self.diagnostics, dict) else {}


class _Format(Struct):
    """The part of summary.json that holds only the version of its format."""

    format: int = 0


def encoded(summary: Summary) -> bytes:
    """Return a summary encoded as the content of summary.json."""
    return json.format(json.encode(summary), indent=2) + b"\n"


def read_summary(folder: Path | str) -> Summary:
    """Read the summary of the run in `folder`.

    Raises:
        StoreError: there is no summary.json, or it is damaged.
        StoreVersion: the file has another format.
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
    """Replace personal means over all devices by means over the devices that took part.

    The former means move to the fields `..._all`. If all devices took part, the scores stay unchanged.
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
