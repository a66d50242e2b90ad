"""Compares the run in a folder with the run that the user asks for."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from fleetune.coordinator.run.changed_settings import difference_words, differences, going_on
from fleetune.coordinator.run.stored_run import FINISHED, edited_sources, stored_run
from fleetune.coordinator.store.device_rows import read_engine
from fleetune.coordinator.store.folder_lock import is_claimed
from fleetune.coordinator.store.run_folder import STATE
from fleetune.coordinator.store.run_store import RunStore
from fleetune.protocols.errors import SettingError, StoreError
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.schedule import UTC
from fleetune.protocols.wire.payloads import Enrolment
from fleetune.tools.simulator.checkpoint.snapshot import STOPPED, read_snapshot
from fleetune.tools.simulator.device_specs import with_start


class OtherRunError(SettingError):
    """The folder holds a run with other settings."""


@dataclass(frozen=True)
class ExistingRun:
    """A run with the same settings in the folder.

    Attributes:
        settings: its settings, with the values that the simulator filled in at its start.
        enrolment: enrolment of the run.
        rounds: stored rounds.
        finished: True if the run has ended and its results are written.
        restart_reason: why the run cannot be resumed; "" if it can.
        edited: the user's files that changed since the run; "" if none did. A run with changed files is not
            finished.
    """

    settings: RunSettings
    enrolment: Enrolment
    rounds: int
    finished: bool
    restart_reason: str
    edited: str = ""


def find_existing_run(asked: RunSettings, folder: Path) -> ExistingRun | None:
    """Return the simulation with these settings that `folder` holds; None if there is none.

    Raises:
        OtherRunError: the folder holds a run with other settings.
        StoreError: the run is damaged or of another version, or another process simulates it now.
    """
    if not _has_begun(folder):
        return None
    with stored_run(folder) as stored:
        wanted = _as_begun(asked, stored.settings)
        found = differences(stored.settings, going_on(stored.settings, wanted), stored.enrolment.spec)
        if found:
            raise OtherRunError(
                f"{folder} holds a run with other settings: {difference_words(found)}; set another run.name"
            )
        engine, restart_reason = read_engine(stored.store), ""
        if engine is not None and STOPPED in (engine.ending.ends, engine.ending.reason):
            restart_reason = "its caller had ended it early"
        elif read_snapshot(stored.store) is None:
            restart_reason = "no round had ended"
        edited = edited_sources(stored.store, asked)
        finished = stored.store.get(FINISHED) is not None and not edited
        rounds = 0 if engine is None else engine.rounds_done
        return ExistingRun(
            stored.settings, stored.enrolment, rounds, finished, edited or restart_reason, edited
        )


def _has_begun(folder: Path) -> bool:
    if not (folder / STATE).exists():
        return False
    if is_claimed(folder):
        raise StoreError(
            f"{folder}: another process simulates this run now; wait for it, or set another run.name"
        )
    with closing(RunStore.read(folder / STATE)) as store:
        return store.get("settings") is not None


def _as_begun(asked: RunSettings, before: RunSettings) -> RunSettings:
    """Return the requested settings with the values that the earlier simulation filled in at its start."""
    model, round_ = asked.model, with_start(asked).round
    model = replace(
        model,
        input_shape=model.input_shape or before.model.input_shape,
        num_classes=before.model.num_classes if model.num_classes is None else model.num_classes,
    )
    if asked.fleet.availability == 1:
        round_ = replace(round_, start_with=before.round.start_with)
    schedule = replace(asked.schedule, zone=asked.schedule.zone or UTC)
    return replace(asked, model=model, round=round_, schedule=schedule)
