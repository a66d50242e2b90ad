"""Write a simulated fleet's data as one file for each device, for real agents."""

from collections.abc import Iterator
from pathlib import Path

from fleetune.coordinator.run.models import find_model
from fleetune.edge_agent.training.device_data import save_npz
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.tools.simulator.device_specs import device_specs, with_group_devices
from fleetune.tools.simulator.partitioned_data import PartitionedData
from fleetune.tools.simulator.run_devices import with_model_shape


def write_device_files(settings: RunSettings, folder: Path) -> Iterator[Path]:
    """Write `folder/<device>.npz` for each device of [fleet]; yield the path of each written file.

    An agent with this file has exactly the samples of its device in a simulation.

    Raises:
        DataError, SettingError, StoreError: the data cannot be read, partitioned or written.
    """
    settings = with_group_devices(settings)
    shares = PartitionedData.of_run(settings)
    spec = find_model(with_model_shape(settings, shares)).spec
    for device in device_specs(settings.fleet, settings.run.seed):
        path = folder / f"{device.name}.npz"
        save_npz(path, shares.device_data(device.index, spec))
        yield path
