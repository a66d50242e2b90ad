"""A simulated fleet's data as files, one a device, for real agents to train on."""

from collections.abc import Iterator
from pathlib import Path

from fleetune.coordinator.run.models import find_model
from fleetune.edge_agent.training.device_data import save_npz
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.tools.simulator.device_specs import device_specs, with_group_devices
from fleetune.tools.simulator.partitioned_data import PartitionedData
from fleetune.tools.simulator.run_devices import with_model_shape


def write_device_files(settings: RunSettings, folder: Path) -> Iterator[Path]:
    """Write `folder/<device>.npz` for each device of [fleet]; each file as it is written.

    An agent that is given its file holds exactly the samples its double in a simulation holds.

    Raises:
        DataError, SettingError, StoreError.
    """
    settings = with_group_devices(settings)
    shares = PartitionedData.of_run(settings)
    spec = find_model(with_model_shape(settings, shares)).spec
    for device in device_specs(settings.fleet, settings.run.seed):
        path = folder / f"{device.name}.npz"
        save_npz(path, shares.device_data(device.index, spec))
        yield path
