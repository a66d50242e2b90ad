"""Which run an order is for: named by its folder, or by its name in a service's folder."""

import difflib
from pathlib import Path

from fleetune.coordinator.service.service import RUNS, is_service, read_statuses
from fleetune.coordinator.store.run_folder import STATE
from fleetune.protocols.errors import SettingError


def folder_of(run: str, service: Path) -> Path:
    """The folder of the run that is meant.

    Args:
        run: its folder, or its name.
        service: the folder of the service that a name belongs to.

    Raises:
        SettingError: there is no such run.
        StoreError: what the service left is damaged.
    """
    if (Path(run) / STATE).exists():
        return Path(run)
    if not is_service(service):
        raise SettingError(
            f"{run} holds no run: name the folder of one, e.g. runs/demo, or a service's run with --service"
        )
    known = [note.name for note in read_statuses(service)]
    if run not in known:
        near = difflib.get_close_matches(run, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known) or 'none'}"
        raise SettingError(f"the service in {service} has no run {run!r}; {hint}")
    return service / RUNS / run
