"""Checks of a stored run before a service starts it or changes its settings."""

from pathlib import Path

from fleetune.coordinator.run.changed_settings import check_changes, differences, going_on, is_raised
from fleetune.coordinator.run.stored_run import FINISHED, stored_run
from fleetune.coordinator.store.device_rows import read_engine
from fleetune.coordinator.store.run_folder import STATE
from fleetune.protocols.settings.run_settings import RunSettings


def is_finished(folder: Path, settings: RunSettings) -> bool:
    """True if the stored run is finished and these settings do not add rounds to it.

    Raises:
        FleetuneError: the folder does not hold a run of Fleetune, or its store is damaged.
    """
    if not (folder / STATE).exists():
        return False
    with stored_run(folder) as stored:
        return stored.store.get(FINISHED) is not None and not is_raised(stored.settings, settings)


def check_fits(folder: Path, settings: RunSettings) -> None:
    """Check that the stored run could continue with these settings.

    Raises:
        SettingError: it could not; the message gives the reason.
        FleetuneError: the folder does not hold a run of Fleetune, or its store is damaged.
    """
    if not (folder / STATE).exists():
        return
    with stored_run(folder) as stored:
        engine = read_engine(stored.store)
        if engine is None:
            return  # no device has joined yet, so the run starts anew with any settings
        found = differences(stored.settings, going_on(stored.settings, settings), stored.enrolment.spec)
        check_changes(found, engine.rounds_done, folder)
