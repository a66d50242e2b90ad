"""A whole simulated run: from a run.toml to the folder it leaves."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from fleetune.coordinator.metrics.summary import Summary
from fleetune.coordinator.reports.report import summary_of, write_figures, write_report
from fleetune.coordinator.rounds.window_engine import check_method
from fleetune.coordinator.run.enrolment import Beginning, begin
from fleetune.coordinator.run.models import Model, find_model, is_at_hand
from fleetune.coordinator.run.observers import Observer, Observers
from fleetune.coordinator.run.open_or_resume import open_run
from fleetune.coordinator.run.round_journal import RoundJournal
from fleetune.coordinator.run.run_events import Notice, RunBegan, RunLeft
from fleetune.coordinator.run.starting_weights import run_named
from fleetune.coordinator.run.stored_run import (
    BUNDLE,
    Run,
    mark_finished,
    method_of,
    save_shared_model,
    stored_run,
)
from fleetune.coordinator.store.run_folder import DEVICES
from fleetune.edge_agent.budget.owner_policy import Policy
from fleetune.edge_agent.stream.retention import Bounds
from fleetune.edge_agent.training.single_sample import has_single_batches, resting_words
from fleetune.edge_agent.training.trainers import installed
from fleetune.protocols.errors import SettingError
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.run_toml import convert
from fleetune.protocols.settings.schedule import UTC
from fleetune.protocols.tasks import task_of
from fleetune.protocols.update.base import Base
from fleetune.protocols.update.encodings import RAW
from fleetune.protocols.wire.payloads import Enrolment
from fleetune.protocols.wire.transfer import digest_of
from fleetune.tools.simulator.caller_samples import NO_CALLER_SAMPLES, CallerSamples
from fleetune.tools.simulator.checkpoint.existing_run import ExistingRun, find_existing_run
from fleetune.tools.simulator.first_choices import FirstChoices
from fleetune.tools.simulator.pending_work import PendingWork
from fleetune.tools.simulator.simulated_device import SimulatedDevice
from fleetune.tools.simulator.simulated_fleet import (
    PartitionedData,
    SampleCounts,
    check_counts,
    check_ends,
    device_specs,
    with_group_devices,
)
from fleetune.tools.simulator.simulation import OnRound, Simulation
from fleetune.tools.simulator.starting_models import carry_over
from fleetune.tools.simulator.streams.arrivals import ArrivalSchedule
from fleetune.tools.simulator.streams.daily_scores import DailyScores, Growing
from fleetune.tools.simulator.streams.stream_devices import stream_devices
from fleetune.tools.simulator.workers import worker
from fleetune.tools.simulator.workers.job_batches import BatchingExecutor
from fleetune.tools.simulator.workers.trainer_choice import (
    TrainerChoice,
    choose_trainer,
    norms_on_single_samples,
)
from fleetune.tools.simulator.workers.worker_processes import WorkerProcesses, warm_up
from fleetune.tools.simulator.world import world_of

_NAMED = 5  # devices in a line


class Inline(Executor):
    """Does the work at once, in this process: for runs too small to be worth a pool of workers."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


def with_model_shape(settings: RunSettings, shares: PartitionedData) -> RunSettings:
    """Fill in the model's input shape and number of classes from the data where run.toml is silent."""
    x, y = shares.dataset.x, shares.dataset.y
    shape = x.shape[1:] if x.ndim > 3 or x.dtype != "uint8" else (1, *x.shape[1:])
    model = settings.model
    filled = replace(
        model,
        input_shape=model.input_shape or tuple(int(n) for n in shape),
    )
    if filled.num_classes is None:
        task = task_of(settings.task)
        filled = replace(filled, num_classes=task.num_outputs(filled.input_shape or (), y))
    return replace(settings, model=filled)


def simulate(
    settings: RunSettings,
    folder: Path,
    *,
    workers: int,
    fresh: bool,
    observers: Iterable[Observer] = (),
    runs: Path | None = None,
    caller_samples: CallerSamples = NO_CALLER_SAMPLES,
    on_round: OnRound | None = None,
    cluster: str | None = None,
) -> tuple[Run, Summary]:
    """Simulate a run, or go on with one that was stopped; the open run and its summary.

    Args:
        settings: of the run.
        folder: of the run.
        workers: processes that train devices, one torch thread each; 0: none but this one.
        fresh: replace what an earlier run left in the folder.
        observers: told of what happens, that the run goes on, and, where it continues another run, what its
            devices begin with.
        runs: the folder of runs that this one may start from; None: the one that `folder` is in.
        caller_samples: what the caller gives instead of what [data] names; `settings` say so already.
        on_round: see `Simulation`.
        cluster: address of a Ray cluster on whose nodes the workers are; None: they are processes of this
            machine.

    Raises:
        FleetuneError: settings, data or model are wrong, or the folder holds a finished run, or another one;
            StoreError when the disk is full, or somebody simulates it now.
    """
    if workers:
        warm_up()
    if not settings.fleet.devices:
        settings = with_group_devices(settings, caller_samples.samples(settings))
    if cluster is not None and settings.fleet.cards:
        asked = settings.fleet.train_on
        raise SettingError(f"fleet.train_on {asked}: on a Ray cluster only processors train")
    if cluster is not None and settings.fleet.at_once > 1:
        raise SettingError("fleet.at_once: on a Ray cluster a worker trains one device after the other")
    runs = runs or folder.parent
    there = None if fresh else find_existing_run(settings, folder)
    if there is not None and there.finished:
        raise SettingError(f"{folder} holds this run, finished; --fresh plays it again")
    if there is None or there.why_anew:
        opened = _begin(settings, folder, runs, caller_samples, workers, fresh=fresh or there is not None)
    else:
        opened = _go_on(there, folder, caller_samples)
    run = opened.run
    journal = RoundJournal(folder, run.controller.records)
    watching = Observers([journal, *observers])
    watching.tell(RunBegan(run.enrolment.run, run.settings, run.controller.records(), simulated=True))
    for line in (_words(there, folder), opened.begins):
        if line:
            watching.tell(Notice(line))
    try:
        with _executor(run, workers, caller_samples, cluster, watching) as executor:
            _play(opened, executor, workers, watching, on_round)
    except BaseException:
        run.processor.note()
        run.store.close()
        raise
    finally:
        watching.tell(RunLeft())
    run.processor.note()
    summary, growing = opened.with_groups(summary_of(run, simulated=True)), opened.growing
    return run, summary if growing is None else replace(summary, days=growing.days.ended)


@dataclass(frozen=True)
class _Opened:
    """A run to be played; `begins`: with what its devices do, "": with nothing special; `groups`: those of
    the data that each device has.
    """

    run: Run
    players: list[SimulatedDevice]
    sent_bytes: int = 0
    growing: Growing | None = None
    begins: str = ""
    groups: Mapping[str, str] = field(default_factory=dict)

    def with_groups(self, summary: Summary) -> Summary:
        """The summary that says which groups of the data a device has."""
        rows = summary.by_device.items()
        named = {name: replace(row, group=self.groups.get(name) or UNSET) for name, row in rows}
        return replace(summary, by_device=named)


def _found_aside(settings: RunSettings, *, workers: int) -> Model:
    """The run's model, looked at by a worker where that takes torch: this process has no other need of it."""
    if not workers or is_at_hand(settings):
        return find_model(settings)
    with WorkerProcesses(1) as aside:
        found: Model = aside.submit(find_model, settings).result()
    return found


def _chosen_aside(
    settings: RunSettings, beginning: Beginning, shares: PartitionedData, workers: int
) -> TrainerChoice:
    """What trains in a run; a worker finds out, where there is something to find out."""
    fleet = settings.fleet
    plain = not fleet.cards and fleet.at_once == 1 and fleet.precision == "float32"
    if plain and fleet.trainer == "torch" and "torch" in installed():
        return TrainerChoice()
    enrolment = beginning.enrolment
    arguments = settings, enrolment, beginning.backbone, shares.of(0, enrolment.spec)
    if not workers:
        return choose_trainer(*arguments)
    with WorkerProcesses(1) as aside:
        chosen: TrainerChoice = aside.submit(choose_trainer, *arguments).result()
    return chosen


def _single_samples(
    settings: RunSettings, beginning: Beginning, shares: PartitionedData, trains: TrainerChoice, workers: int
) -> str:
    """Which devices train on one sample a batch, and what norms do there; "": none, or nothing special."""
    enrolment = beginning.enrolment
    spec, batch_size = enrolment.spec, settings.training.batch_size
    if settings.data.arrivals is not None:
        return ""
    sizes = zip(device_specs(settings), shares.sizes(spec), strict=True)
    names = [device.name for device, own in sizes if has_single_batches(spec, own.train, batch_size)]
    if not names:
        return ""
    arguments = enrolment, beginning.backbone, trains
    if workers:
        with WorkerProcesses(1) as aside:
            norms: list[str] = aside.submit(norms_on_single_samples, *arguments).result()
    else:
        norms = norms_on_single_samples(*arguments)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    verb = "has" if len(names) == 1 else "have"
    return resting_words(f"{', '.join(names[:_NAMED])}{more} {verb} 1 training sample", norms, batch_size)


def _begin(
    settings: RunSettings,
    folder: Path,
    runs: Path,
    caller_samples: CallerSamples,
    workers: int,
    *,
    fresh: bool,
) -> _Opened:
    """A new run; whatever can fail is tried before an earlier one is removed."""
    check_counts(settings)
    check_ends(settings)
    shares = PartitionedData(settings, caller_samples)
    settings = with_model_shape(settings, shares)
    beginning = begin(settings, runs, partial(_found_aside, workers=workers))
    enrolment = beginning.enrolment
    check_method(settings, method_of(enrolment))
    growing = _growing(settings, shares)
    players = _players(settings, enrolment, shares)
    settings = replace(settings, round=replace(settings.round, start_with=_start_with(settings, players)))
    zone = settings.schedule.zone or UTC  # whatever this machine's is
    settings = replace(settings, schedule=replace(settings.schedule, zone=zone))
    trains = _chosen_aside(settings, beginning, shares, workers)
    single = _single_samples(settings, beginning, shares, trains, workers)
    settings = replace(settings, fleet=replace(settings.fleet, trainer=trains.kind))
    run = open_run(
        settings,
        folder,
        fresh=fresh,
        durable=False,
        enrolment=enrolment,
        backbone=beginning.backbone,
        bundle=trains.bundle,
    )
    try:
        names = [player.name for player in players]
        begins = carry_over(settings, run.enrolment, names, folder / DEVICES, runs)
        words = "; ".join(filter(None, (begins, trains.words, single)))
        sent_bytes = _sent_at_first(run, beginning, runs)
        return _Opened(run, players, sent_bytes, growing, words, _groups(settings, shares))
    except BaseException:
        run.store.close()
        raise


def _go_on(there: ExistingRun, folder: Path, caller_samples: CallerSamples) -> _Opened:
    """A run that was stopped."""
    shares = PartitionedData(there.settings, caller_samples)
    players = _players(there.settings, there.enrolment, shares)
    run = open_run(there.settings, folder, durable=False)
    run.controller.recall()
    growing, groups = _growing(there.settings, shares), _groups(there.settings, shares)
    return _Opened(run, players, growing=growing, groups=groups)


def _groups(settings: RunSettings, shares: PartitionedData) -> dict[str, str]:
    """Names of the groups of data of each device; {}: the data are not split by group."""
    if settings.data.partition.kind != "group":
        return {}
    return {device.name: shares.group(device.index) for device in device_specs(settings)}


def _words(there: ExistingRun | None, folder: Path) -> str:
    """What is done with a run that was there."""
    if there is None:
        return ""
    if there.edited:
        return f"{folder} was begun with other code ({there.edited}): it begins anew"
    if there.why_anew:
        return f"{folder} was stopped: it begins anew ({there.why_anew}), and comes to the same figures"
    return f"{folder} was stopped: it goes on after round {there.rounds}"


def write_results(run: Run, summary: Summary, *, finished: bool = True, report: bool = True) -> list[Path]:
    """Write what a simulated run leaves in its folder, its shared model too, and close it; the files.

    The report takes longest and comes last: whoever interrupts it has a finished run.

    Args:
        run: to close.
        summary: of it.
        finished: False: its caller ended it, and may want all of it later.
        report: pictures and report.html too, not only figures.

    Raises:
        StoreError: a file cannot be written.
    """
    records = run.controller.records()
    with closing(run.store):
        files = write_figures(run.folder, summary, records)
        model = save_shared_model(run)
        if finished:
            mark_finished(run)
        if report:
            boards = {device.name: device.board.name for device in device_specs(run.settings)}
            files = write_report(run.folder, run.settings, summary, records, boards=boards, durable=False)
    return [*files, model]


def _sent_at_first(run: Run, beginning: Beginning, runs: Path) -> int:
    """Bytes that each device gets before its first round: a backbone only where it has none from before."""
    before = run_named(run.settings)
    if beginning.backbone is None:
        return len(run.payload)
    if before is not None:
        with stored_run(runs / before) as kept:
            known = kept.enrolment.spec.backbone
        if known is not UNSET and known.digest == digest_of(beginning.backbone):
            return len(run.payload)
    return len(run.payload) + len(beginning.backbone)


def _growing(settings: RunSettings, shares: PartitionedData) -> Growing | None:
    """What comes to the devices; None: their data do not grow.

    Raises:
        SettingError: [data.arrivals] is wrong.
    """
    if settings.data.arrivals is None:
        return None
    convert(settings.data.arrivals.keep, Bounds, "data.arrivals.keep")
    deliveries = ArrivalSchedule(settings, shares)
    deliveries.check()
    return Growing(deliveries, DailyScores(task_of(settings.task)))


def _play(
    opened: _Opened,
    executor: Executor,
    workers: int,
    observers: Observers,
    on_round: OnRound | None,
) -> None:
    size, at_once = opened.run.enrolment.spec.size, opened.run.settings.fleet.at_once
    if at_once > 1:
        executor = BatchingExecutor(executor, at_once)
    at_hand = PendingWork(executor, max(2, 2 * workers) * at_once, size)
    Simulation(
        opened.run,
        opened.sent_bytes,
        opened.players,
        at_hand,
        world=world_of(opened.run.settings),
        growing=opened.growing,
        observers=observers,
        on_round=on_round,
    ).run()


def _players(settings: RunSettings, enrolment: Enrolment, shares: PartitionedData) -> list[SimulatedDevice]:
    method, policy = method_of(enrolment), convert(settings.fleet.policy, Policy, "fleet.policy")
    growing = stream_devices(settings, enrolment, shares, Path(), None)
    players, base = [], None
    if enrolment.downlink.name != RAW:
        base = Base.whole(enrolment.weights).digest
    if growing is None:
        sizes = shares.sizes(enrolment.spec)
    else:
        sizes = [SampleCounts.of(growing.first_data(index)) for index in range(settings.fleet.devices)]
    first_choices = FirstChoices(enrolment, method, policy)
    for device, own in zip(device_specs(settings), sizes, strict=True):
        flops, compact = enrolment.flops_per_sample, enrolment.compact is True
        players.append(
            SimulatedDevice.of(device, first_choices.of(device, own), policy, flops, compact=compact)
        )
        players[-1].base = base
    return players


def _start_with(settings: RunSettings, players: list[SimulatedDevice]) -> int:
    """Everybody has said whether it takes part before the first round, unless devices come and go."""
    refusals = [player.refusal for player in players]
    if None not in refusals:
        raise SettingError(f"no device can take part: {refusals[0]}")
    return (settings.round.start_with or 1) if settings.fleet.availability < 1 else len(players)


@contextmanager
def _executor(
    run: Run, workers: int, caller_samples: CallerSamples, cluster: str | None, observers: Observers
) -> Iterator[Executor]:
    bundle = run.store.get(BUNDLE) if run.settings.fleet.trainer == "onnx" else None
    arguments = run.settings, run.payload, run.folder / DEVICES, caller_samples, bundle
    if cluster is not None:
        from fleetune.tools.simulator.ray_engine.ray_workers import RayWorkers
        from fleetune.tools.simulator.ray_engine.run_package import pack_run

        def tell(line: str) -> None:
            observers.tell(Notice(line))

        with RayWorkers(cluster, max(1, workers), pack_run(*arguments), arguments[2], tell) as nodes:
            yield nodes
        return
    if not workers:
        worker.set_up(*arguments)
        yield Inline()
        return
    with WorkerProcesses(workers, worker.set_up, arguments) as pool:
        yield pool
