"""What a caller from Python asks for: settings, samples of its own, and who trains."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fleetune.edge_agent.datasets.dataset import Dataset
from fleetune.protocols.errors import SettingError
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.run_toml import settings_of
from fleetune.tools.simulator.caller_samples import Data, caller_dataset
from fleetune.tools.simulator.engine import Engine, Workers, open_workers
from fleetune.tools.simulator.simulated_fleet import with_group_devices


def asked_for(
    settings: RunSettings | Mapping[str, Any] | Path | str, changes: Mapping[str, Any], data: Data | None
) -> tuple[RunSettings, Dataset | None]:
    """The settings with `changes` and with a `data.source` that `data` names, and the samples that it holds
    instead; None: it holds none.

    Raises:
        SettingError: a setting is wrong, or these are no data.
    """
    dataset = caller_dataset(data)
    if isinstance(dataset, str):
        return with_group_devices(settings_of(settings, {**changes, "data.source": dataset})), None
    return with_group_devices(settings_of(settings, changes), dataset), dataset


@contextmanager
def crew_of(engine: str, address: str | None, workers: int) -> Iterator[Workers]:
    """Who trains; 0 workers: none but this process, and on a Ray cluster as many as it has processors.

    Raises:
        SettingError: as `open_workers`, in the words of an argument.
    """
    try:
        with open_workers(
            engine, address, None if engine == Engine.RAY and workers == 0 else workers
        ) as found:
            yield found
    except SettingError as problem:
        raise SettingError(str(problem).removeprefix("--")) from None
