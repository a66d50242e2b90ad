"""What a caller from Python asks for: settings, and samples of its own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleetune.edge_agent.datasets.dataset import Dataset
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.run_toml import settings_of
from fleetune.tools.simulator.given import Data, given_data


def asked_for(
    settings: RunSettings | Mapping[str, Any] | Path | str, changes: Mapping[str, Any], data: Data | None
) -> tuple[RunSettings, Dataset | None]:
    """The settings with `changes` and with a `data.source` that `data` names, and the samples that it holds
    instead; None: it holds none.

    Raises:
        SettingError: a setting is wrong, or these are no data.
    """
    dataset = given_data(data)
    if isinstance(dataset, str):
        return settings_of(settings, {**changes, "data.source": dataset}), None
    return settings_of(settings, changes), dataset
