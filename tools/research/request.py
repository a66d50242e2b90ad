"""Turns a caller's arguments into a request: settings, the caller's samples, and the workers."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetune.edge_agent.datasets.dataset import Dataset
from fleetune.protocols.errors import SettingError
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.run_toml import settings_of
from fleetune.tools.simulator.caller_samples import (
    Assignment,
    CallerSamples,
    Data,
    caller_dataset,
    caller_samples,
)
from fleetune.tools.simulator.device_specs import with_group_devices
from fleetune.tools.simulator.engine import Engine, Workers, open_workers


@dataclass(frozen=True)
class Request:
    """Settings, with the caller's samples and partition instead of those that [data] names."""

    settings: RunSettings
    dataset: Dataset | None
    partition: Assignment | None

    def samples_of(self, settings: RunSettings) -> CallerSamples:
        """Return the samples of a run with these settings."""
        return caller_samples(settings, self.dataset, self.partition)


def request_of(
    settings: RunSettings | Mapping[str, Any] | Path | str,
    changes: Mapping[str, Any] | None,
    data: Data | None,
    partition: Assignment | None,
) -> Request:
    """Return the request of a call; for the arguments see `fleetune.simulate`.

    Raises:
        SettingError: a setting is wrong, or `data` is not valid.
    """
    changes, dataset = dict(changes or {}), caller_dataset(data)
    if isinstance(dataset, str):
        changes, dataset = {**changes, "data.source": dataset}, None
    return Request(with_group_devices(settings_of(settings, changes), dataset), dataset, partition)


@contextmanager
def workers_of(
    engine: str, address: str | None, workers: int | None, num_cards: int = 0, *, in_arguments: bool = True
) -> Iterator[Workers]:
    """Yield the workers of a call; a Ray cluster started for the call ends with the block.

    With `workers` = 0, a local call uses this process only, and a Ray cluster uses all processors.

    Args:
        engine: see `engine.open_workers`.
        address: see `engine.open_workers`.
        workers: see `engine.open_workers`.
        num_cards: see `engine.open_workers`.
        in_arguments: True if errors in the block name an argument, `seeds`, instead of an option, `--seeds`.
    """
    on_ray = engine == Engine.RAY and workers == 0
    try:
        with open_workers(engine, address, None if on_ray else workers, num_cards) as found:
            yield found
    except SettingError as problem:
        raise SettingError(str(problem).removeprefix("--" * in_arguments)) from None
