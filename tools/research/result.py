"""Returns results of a run as data frames, from the folder of a simulation or of a real fleet's run."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.metrics.metric import unit_of
from fleetune.coordinator.metrics.personal_scores import with_personal
from fleetune.coordinator.metrics.registry import PERSONAL_MEAN
from fleetune.coordinator.metrics.summary import SUMMARY, Summary, read_summary
from fleetune.coordinator.reports.report import summary_of
from fleetune.coordinator.rounds.engine_state import EngineState
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.coordinator.run.round_journal import ROUNDS
from fleetune.coordinator.run.stored_run import FINISHED, look_at, stored_run
from fleetune.coordinator.store.device_rows import read_engine
from fleetune.coordinator.store.run_folder import DEVICES, STATE
from fleetune.protocols.errors import SettingError, StoreError
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.tools.compare.finished_run import FinishedRun
from fleetune.tools.compare.rows import (
    columns_of_devices,
    columns_of_rounds,
    day_rows,
    device_rows,
    diagnostics_rows,
    frame_of,
    round_rows,
)
from fleetune.tools.compare.runs import SETTINGS

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """The results of a run.

    The data frames need pandas. Columns are metrics, with the same names as in summary.json and CSV files;
    names include units. A score's column has the name of the task's score: `accuracy_after` or `mae_after`. A
    share is a fraction of 1.

    Attributes:
        folder: folder of the run.
        settings: settings of the run.
        summary: content of the run's summary.json; for a run in progress, its present state.
        records: records of the closed rounds, ascending, the final evaluation included.
        finished: True if all rounds are done.
    """

    folder: Path
    settings: RunSettings
    summary: Summary
    records: tuple[RoundRecord, ...]
    finished: bool = True

    @cached_property
    def rounds(self) -> "pd.DataFrame":
        """One row for each training round, indexed by its number; see `tools.compare.rows.round_rows`."""
        return frame_of(round_rows(self._finished_run), "round", columns_of_rounds(self.summary.judged_by))

    @cached_property
    def devices(self) -> "pd.DataFrame":
        """One row for each device, indexed by its name; see `tools.compare.rows.device_rows`."""
        rows = device_rows(self._finished_run, self.settings)
        return frame_of(rows, "device", columns_of_devices(self.summary.judged_by))

    @cached_property
    def days(self) -> "pd.DataFrame":
        """One row for each day of a simulation in which devices' data grow; see
        `tools.compare.rows.day_rows`.
        """
        return frame_of(day_rows(self.summary), "day", ["day"])

    @cached_property
    def diagnostics(self) -> "pd.DataFrame":
        """The method's diagnostics: one row for each diagnostic, round and part of the diagnostic."""
        return frame_of(diagnostics_rows(self.summary), columns=("round", "figure", "part", "mean"))

    @property
    def _finished_run(self) -> FinishedRun:
        training = [record for record in self.records if not record.final_evaluation]
        return FinishedRun(self.summary.method, self.summary.seed, self.summary, training)

    def __repr__(self) -> str:
        summary = with_personal(self.summary, self.records)
        score = summary.judged_by
        scored = f"{score.title} {unit_of(score).text(PERSONAL_MEAN.of_run(summary))}"
        sent = f"{readable.size(summary.bytes.up)} up"
        state = "" if self.finished else ", not finished"
        text = f"{scored} ({summary.who_took_part})" if summary.who_took_part else scored
        return f"<{summary.method}, {summary.rounds} rounds{state}, personal {text}, {sent}: {self.folder}>"


def read_result(folder: Path | str) -> Result:
    """Return the results of the run in a folder: simulated or of a real fleet, finished or in progress.

    Raises:
        SettingError: the folder holds no run.
        StoreError: the content is damaged.
        StoreVersion: this version cannot read the content's format.
    """
    folder = Path(folder)
    if not (folder / STATE).exists():
        return _of_comparison(folder)
    with stored_run(folder) as stored:
        state = read_engine(stored.store) or EngineState()
        if state.stage == "finished" and (folder / SUMMARY).exists():
            finished = stored.store.get(FINISHED) is not None
            return Result(
                folder, stored.settings, read_summary(folder), tuple(stored.store.records()), finished
            )
    with look_at(folder) as run:
        summary = summary_of(run, simulated=(folder / DEVICES).exists())
        return Result(folder, run.settings, summary, tuple(run.controller.records()), finished=False)


def _of_comparison(folder: Path) -> Result:
    """Return the results of one run of a comparison, which stores only metrics and settings."""
    try:
        settings = msgspec.json.decode((folder / SETTINGS).read_bytes(), type=RunSettings)
        lines = (folder / ROUNDS).read_bytes().splitlines()
        records = tuple(msgspec.json.decode(line, type=RoundRecord) for line in lines)
    except OSError:
        raise SettingError(f"{folder} holds no run: name the folder of one, e.g. runs/demo") from None
    except msgspec.MsgspecError as problem:
        raise StoreError(f"{folder} is damaged: {problem}") from None
    return Result(folder, settings, read_summary(folder), records)
