"""`fleetune.simulate`: one simulated run from Python."""

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
from fleetune.tools.research.request import request_of, workers_of
from fleetune.tools.research.result import Result, read_result
from fleetune.tools.simulator import runner
from fleetune.tools.simulator.caller_samples import Assignment, Data
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
    """Simulate a run, and write its report, weights and pictures to `runs`/<name>.

    A finished run there is read instead of repeated. An interrupted run continues after its last closed
    round, with the same results in the end.

    Args:
        settings: the path of a run.toml, its content as a dict, or the result of `fleetune.read_run`.
        runs: the folder of runs.
        set: values by `section.key` that replace settings: {"run.rounds": 20, "method.name": "fedspu"}.
        data: replaces `data.source`: another source, (x, y), arrays by name, a `fleetune.Dataset`, or a
            function that returns such arrays.
        partition: replaces `data.partition`: for each device the numbers of its samples, or (training
            samples, test samples); or a function that returns this list. Its arguments are the labels, the
            number of devices, and a NumPy generator that depends on the run's seed only.
        on_round: called with a row of `Result.rounds` after each training round. If it returns True,
            no further round begins. An exception in it ends the simulation.
        workers: processes that train devices, one torch thread each; 0: this process does all the work, and
            on a Ray cluster each processor has a worker.
        fresh: True replaces the files of an earlier run of this name.
        report: True also writes pictures and report.html, which takes longer than a small run.
        trackers: experiment trackers that follow the run: "tensorboard", "mlflow", or a factory of your own
            (docs/python.md).
        engine: where devices train: "local" (this machine) or "ray" (the nodes of a Ray cluster).
        address: address of the Ray cluster; None: $RAY_ADDRESS, or without it a cluster for this call only.

    Raises:
        FleetuneError: settings, data or model are wrong; another run has this name; or another process
            simulates it now.
        StoreError: the disk is full.
    """
    request = request_of(settings, set, data, partition)
    samples = request.samples_of(request.settings)
    asked = samples.named_in(request.settings)
    folder, makers = Path(runs) / asked.run.name, makers_of(trackers)
    there = None if fresh else _existing_run(asked, folder)
    if there is not None and there.finished:
        return read_result(folder)
    stop_check = _Stop(asked, on_round)
    with (
        workers_of(engine, address, workers) as (most, cluster),
        Following(makers, folder, folder.name) as following,
    ):
        run, summary = runner.simulate(
            asked,
            folder,
            workers=most,
            cluster=cluster,
            fresh=fresh,
            observers=[_Logged(), following],
            caller_samples=samples,
            on_round=None if on_round is None else stop_check.on_closed,
        )
        records = tuple(run.controller.records())
        files = runner.write_results(run, summary, finished=not stop_check.early, report=report)
        following.finish(summary, records, files)
    return Result(folder, run.settings, summary, records, finished=not stop_check.early)


class _Stop:
    """Ends a run when the caller's `on_round` returns True."""

    def __init__(self, settings: RunSettings, on_round: OnRound | None) -> None:
        self._score = task_of(settings.task).score
        self._on_round = on_round
        self.early = False

    def on_closed(self, record: RoundRecord) -> bool:
        """Pass a closed round to `on_round`; True if no further round should begin."""
        assert self._on_round is not None
        answer = self._on_round(round_row(record, self._score))
        self.early = isinstance(answer, bool | np.bool_) and bool(answer)
        return self.early


class _Logged:
    """Writes the notices of a run to the log."""

    def observe(self, event: RunEvent) -> None:
        """Write a notice to the log."""
        if isinstance(event, Notice):
            log.warning("%s", event.line)


def _existing_run(asked: RunSettings, folder: Path) -> ExistingRun | None:
    try:
        return find_existing_run(asked, folder)
    except OtherRunError as problem:
        raise SettingError(
            f'{problem}, e.g. set={{"run.name": "{folder.name}-2"}} (fresh=True deletes the run)'
        ) from None
