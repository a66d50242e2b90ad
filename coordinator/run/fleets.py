"""The fleets of a folder of runs: those that have a registry, and those of the runs."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from fleetune.coordinator.fleet.fleet_folder import FLEETS
from fleetune.coordinator.run.stored_run import fleet_of, stored_run
from fleetune.coordinator.store.run_folder import STATE
from fleetune.protocols.errors import SettingError


def fleets_in(runs: Path) -> Mapping[str, tuple[Path, ...]]:
    """Return the folders of each fleet's runs, by the fleet's name.

    Raises:
        StoreError: a run's store is damaged; StoreVersion: this version cannot read its format.
    """
    folders = sorted((runs / FLEETS).glob("*"))
    found: dict[str, list[Path]] = {path.name: [] for path in folders if path.is_dir()}
    for state in sorted(runs.glob(f"*/{STATE}")):
        with suppress(SettingError), stored_run(state.parent) as run:  # one that never began has no device
            found.setdefault(fleet_of(run.store, run.settings), []).append(state.parent)
    return {name: tuple(paths) for name, paths in found.items()}
