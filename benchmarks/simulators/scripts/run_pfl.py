"""pfl-research (pfl on PyPI): SimulatedBackend and FederatedAveraging; torchrun starts more processes."""

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from workload_files import given, round_over, save


class Classifier(torch.nn.Module):
    """The network, with the two methods that pfl requires."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network
        self._loss = torch.nn.CrossEntropyLoss()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)

    def loss(self, x: torch.Tensor, y: torch.Tensor, **_: object) -> torch.Tensor:
        self.train()
        return self._loss(self(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor, **_: object) -> dict[str, Weighted]:
        self.eval()
        with torch.inference_mode():
            return {"loss": Weighted(self._loss(self(x), y).item() * len(y), len(y))}


class ReportRounds(TrainingProcessCallback):
    """Prints a line after each round."""

    def after_central_iteration(self, _: Metrics, model: object, *, central_iteration: int) -> tuple:  # noqa: ARG002
        if pytorch_ops.distributed.global_rank == 0:
            round_over(central_iteration + 1)
        return False, Metrics()


def main() -> None:
    torch.set_num_threads(1)
    files, _ = given()
    workload = files.workload
    np.random.seed(0)  # noqa: NPY002 - pfl draws users by it

    def of_user(user: int) -> PyTorchTensorDataset:
        return PyTorchTensorDataset(files.samples(user))

    users = list(range(workload.devices))
    data = FederatedDataset(of_user, get_user_sampler("random", users), dict.fromkeys(users, 1))
    network = Classifier(files.module())
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), 1.0))
    settings = NNAlgorithmParams(
        central_num_iterations=workload.rounds,
        evaluation_frequency=10 * workload.rounds,
        train_cohort_size=workload.participants,
        val_cohort_size=0,
    )
    training = NNTrainHyperParams(
        local_num_epochs=workload.epochs,
        local_learning_rate=workload.learning_rate,
        local_batch_size=workload.batch_size,
    )
    FederatedAveraging().run(
        settings,
        SimulatedBackend(data, data),
        model,
        training,
        NNEvalHyperParams(local_batch_size=None),
        callbacks=[ReportRounds()],
    )
    if pytorch_ops.distributed.global_rank == 0:
        save(network.network.state_dict())


if __name__ == "__main__":
    main()
