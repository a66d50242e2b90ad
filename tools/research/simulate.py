"""`fleetune.simulate`: a whole simulated run from Python, as `edge-sim run` plays it, without a screen."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fleetune.coordinator.metrics.registry import round_row
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.coordinator.run.run_events import Notice, RunEvent
from fleetune.coordinator.trackers.follow import Following
from fleetune.coordinator.trackers.tracker import Make, makers_of
from fleetune.protocols.errors import SettingError
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.tasks import task_of
from fleetune.tools.research.asked import asked_for, crew_of
from fleetune.tools.research.result import Result, read_result
from fleetune.tools.simulator import runner
from fleetune.tools.simulator.caller_samples import Assignment, Data, caller_samples
from fleetune.tools.simulator.checkpoint.existing_run import ExistingRun, OtherRunError, find_existing_run

log = logging.getLogger(__name__)

OnRound = Callable[[dict[str, Any]], object]


def simulate(
    settings: RunSettings | Mapping[str, Any] | Path | str,
    runs: Path | str = "runs",
    *,
    set: Mapping[str, Any] | None = None,  # noqa: A002 - as `edge-sim run --set`
    data: Data | None = None,
    partition: Assignment | None = None,
    on_round: OnRound | None = None,
    workers: int = 0,
    fresh: bool = False,
    report: bool = True,
    trackers: Sequence[str | Make] = (),
    engine: str = "local",
    address: str | None = None,
) -> Result:
    """Simulate a run and leave its report, weights and pictures in `runs`/<name>; what it came to.

    A run that is finished there is read, not played again; one that was stopped goes on after the last round
    that it closed, to the same figures.

    Args:
        settings: the path of a run.toml, what would stand in one as a dict, or what `fleetune.read_run` gave.
        runs: the folder of runs.
        set: values by `section.key`, on top of the settings: {"run.rounds": 20, "method.name": "fedspu"}.
        data: instead of `data.source`: a source as it would stand there, (x, y), arrays by name, a
            `fleetune.Dataset`, or a function that gives such arrays.
        partition: instead of `data.partition`: of each device the numbers of its samples, or (training
            samples, test samples); or a function that gives this list of (labels, number of devices,
            a NumPy generator that the run's seed decides).
        on_round: told of every training round when it closed, as a row of `Result.rounds`; when it answers
            True, no further round begins. What it raises ends the simulation.
        workers: processes that train devices, one torch thread each; 0: none but this one, and on a Ray
            cluster one a processor.
        fresh: replace what an earlier run of this name left.
        report: leave pictures and report.html, too; they take longer than a small run.
        trackers: experiment trackers that follow the run: "tensorboard", "mlflow", or what makes one of your
            own (docs/python.md).
        engine: where devices work: "local", here, or "ray", on the nodes of a Ray cluster.
        address: of that cluster; None: $RAY_ADDRESS, and without it one begins and ends with this call.

    Raises:
        FleetuneError: settings, data or model are wrong; there is another run of this name, or somebody
            simulates it now.
        StoreError: the disk is full.
    """
    asked, dataset = asked_for(settings, set or {}, data)
    brought = caller_samples(asked, dataset, partition)
    asked = brought.named_in(asked)
    folder, makers = Path(runs) / asked.run.name, makers_of(trackers)
    there = None if fresh else _standing(asked, folder)
    if there is not None and there.finished:
        return read_result(folder)
    stopped = _Stop(asked, on_round)
    with (
        crew_of(engine, address, workers) as (most, cluster),
        Following(makers, folder, folder.name) as following,
    ):
        run, summary = runner.simulate(
            asked,
            folder,
            workers=most,
            cluster=cluster,
            fresh=fresh,
            observers=[_Logged(), following],
            caller_samples=brought,
            on_round=None if on_round is None else stopped.hears,
        )
        records = tuple(run.controller.records())
        files = runner.write_results(run, summary, finished=not stopped.early, report=report)
        following.finish(summary, records, files)
    return Result(folder, run.settings, summary, records, finished=not stopped.early)


class _Stop:
    """Whether the caller, told of a round, ended the run."""

    def __init__(self, settings: RunSettings, on_round: OnRound | None) -> None:
        self._score = task_of(settings.task).score
        self._on_round = on_round
        self.early = False

    def hears(self, record: RoundRecord) -> bool:
        """Take a closed round in; whether it was the last."""
        assert self._on_round is not None
        answer = self._on_round(round_row(record, self._score))
        self.early = isinstance(answer, bool | np.bool_) and bool(answer)
        return self.early


class _Logged:
    """Lines for people go to the log."""

    def observe(self, event: RunEvent) -> None:
        """Take an event in."""
        if isinstance(event, Notice):
            log.warning("%s", event.line)


def _standing(asked: RunSettings, folder: Path) -> ExistingRun | None:
    try:
        return find_existing_run(asked, folder)
    except OtherRunError as problem:
        raise SettingError(
            f'{problem}, e.g. set={{"run.name": "{folder.name}-2"}} (fresh=True deletes the run)'
        ) from None
