"""What a caller asks for: settings, samples of its own, and who executes the runs."""

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
    """Settings, and the samples and partition that the caller gives instead of those that [data] names."""

    settings: RunSettings
    dataset: Dataset | None
    partition: Assignment | None

    def samples_of(self, settings: RunSettings) -> CallerSamples:
        """The samples of a run with these settings."""
        return caller_samples(settings, self.dataset, self.partition)


def request_of(
    settings: RunSettings | Mapping[str, Any] | Path | str,
    changes: Mapping[str, Any] | None,
    data: Data | None,
    partition: Assignment | None,
) -> Request:
    """The request of a call; the arguments are those of `fleetune.simulate`.

    Raises:
        SettingError: a setting is wrong, or these are no data.
    """
    changes, dataset = dict(changes or {}), caller_dataset(data)
    if isinstance(dataset, str):
        changes, dataset = {**changes, "data.source": dataset}, None
    return Request(with_group_devices(settings_of(settings, changes), dataset), dataset, partition)


@contextmanager
def workers_of(
    engine: str, address: str | None, workers: int | None, num_cards: int = 0, *, in_arguments: bool = True
) -> Iterator[Workers]:
    """The workers of a call; 0: this process alone, and on a Ray cluster as many as it has processors.

    Args:
        engine: see `engine.open_workers`.
        address: likewise.
        workers: likewise.
        num_cards: likewise.
        in_arguments: errors inside of the block name an argument, `seeds`, instead of an option, `--seeds`.
    """
    on_ray = engine == Engine.RAY and workers == 0
    try:
        with open_workers(engine, address, None if on_ray else workers, num_cards) as found:
            yield found
    except SettingError as problem:
        raise SettingError(str(problem).removeprefix("--" * in_arguments)) from None
