"""A small fleet in memory: the product's data, partition, model and local training, without a clock."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from fleetune.coordinator.run.enrolment import prepare
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.edge_agent.training.trainers import make_backend
from fleetune.protocols.method.trainer import FitPlan
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.settings.run_toml import read_run
from fleetune.protocols.wire.payloads import run_key, work_key
from fleetune.tools.simulator.partitioned_data import PartitionedData
from fleetune.tools.simulator.run_devices import with_model_shape

_RUN_TOML = """
[run]
name = "wire"
seed = {seed}
rounds = {rounds}
[model]
name = "{model}"
[method]
name = "fedavg"
[data]
source = "{source}"
partition = {partition}
mean = {mean}
std = {std}
[training]
epochs = 1
batch_size = 16
learning_rate = {learning_rate}
momentum = {momentum}
schedule = "{schedule}"
[round]
participants = {participants}
[fleet]
devices = {devices}
"""


@dataclass(frozen=True)
class Setting:
    """Data, model and fleet of one setting.

    Attributes:
        source, partition: the keys of [data].
        model: name of a built-in model.
        devices, participants: number of devices in the fleet, and in a round.
        rounds: number of rounds of a run.
        learning_rate, momentum: local SGD with one epoch a round and batches of 16.
        schedule: schedule of the learning rate over the rounds.
        mean, std: the keys of [data] that scale the inputs.
    """

    source: str
    partition: str
    model: str
    devices: int
    participants: int
    rounds: int
    learning_rate: float
    momentum: float = 0.0
    schedule: str = "constant"
    mean: float = 0.0
    std: float = 1.0


def _fashion(partition: str) -> Setting:
    words = "{ " + partition + ", samples = 714 }"  # 500 for training, the others for testing
    return Setting("idx:fashion-mnist", words, "lenet5", 20, 10, 80, 0.05)


_NEWS = "csv:ag_news/ag_news_test.csv.gz?names=class,title,words&label=class&classes=1,2,3,4&text=title,words"
_NEWS_SPLIT = '{ kind = "dirichlet", alpha = 0.5 }'
_SPOKEN = "audio:free-spoken-digit-dataset/recordings?rate=8000&names=label,group,take"
_BY_SPEAKER = '{ kind = "group" }'

SETTINGS = {
    "har": Setting("har:UCI HAR Dataset", '{ kind = "group" }', "mlp", 30, 10, 200, 0.05, 0.9),
    "fashion-0.5": _fashion('kind = "mix", alpha = 0.5'),
    "fashion-0.1": _fashion('kind = "mix", alpha = 0.1'),
    "fashion-iid": _fashion('kind = "iid"'),
    "news": Setting(_NEWS, _NEWS_SPLIT, "text-embedding", 20, 10, 150, 4.0, 0.9),
    "digits-spoken": Setting(_SPOKEN, _BY_SPEAKER, "lenet5", 6, 6, 80, 0.02, 0.9, mean=-10.0, std=5.0),
}


class Fleet:
    """The devices of a setting with their samples; equal seeds give equal partitions and draws."""

    def __init__(self, setting: Setting, seed: int) -> None:
        with TemporaryDirectory() as folder:
            path = Path(folder) / "run.toml"
            path.write_text(_RUN_TOML.format(**setting.__dict__, seed=seed))
            settings = read_run(path)
        self._shares = PartitionedData.of_run(settings)
        enrolment = prepare(with_model_shape(settings, self._shares))
        self.setting, self.seed = setting, seed
        self.spec: ModelSpec = enrolment.spec
        self.first_weights: FlatArray = enrolment.weights
        self._training = enrolment.training
        self._backend = make_backend("torch", enrolment.spec, None, 1, task=enrolment.learns)

    @cached_property
    def trainers(self) -> list[LocalTrainer]:
        """One trainer for each device."""
        data = [self._shares.device_data(index, self.spec) for index in range(self.setting.devices)]
        return [LocalTrainer(self._backend, each, self._training) for each in data]

    def participants(self, number: int) -> list[int]:
        """Participants of round `number`, ascending; the same for all configurations."""
        key = run_key(self.seed).child("participants", number)
        drawn = key.sample(self.setting.participants, self.setting.devices)
        return [int(index) for index in np.sort(drawn)]

    def trained(self, weights: FlatArray, device: int, number: int) -> FlatArray:
        """Weights after a device's local training in round `number`."""
        key = work_key(self.seed, number, 1, f"device-{device}")
        return self.trainers[device].in_round(number, None).fit(weights, FitPlan(), key).weights

    def num_samples(self, device: int) -> int:
        """Number of a device's training samples."""
        return self.trainers[device].num_samples

    def accuracy(self, weights: FlatArray) -> float:
        """Accuracy of these weights on the test samples of all devices, 0 to 1."""
        right, total = 0.0, 0
        for trainer in self.trainers:
            right += (trainer.accuracy(weights) or 0.0) * trainer.num_test
            total += trainer.num_test
        return right / total
