"""APPFL: its virtual-time driver, with all clients in one process, without evaluation."""

import logging
from pathlib import Path

import torch
from appfl.agent import SimClientAgent, SimServerAgent
from appfl.vsim import ClientProfile, SyncSimDriver
from workload_files import Files, given, round_over, save

OWN = """
import torch

def network():
    return torch.load({module!r}, weights_only=False)

def accuracy(true, predicted):
    return float((true == predicted.argmax(axis=1)).mean())
"""


class ReportingDriver(SyncSimDriver):
    """Prints a line after each round."""

    def _run_round(self) -> bool:
        done = super()._run_round()
        round_over(self._round + 1)
        return done


def settings_of(files: Files) -> dict:
    """Settings of its YAML files, without its options that save memory and double the time."""
    workload = files.workload
    training = {
        "mode": "epoch",
        "num_local_epochs": workload.epochs,
        "optim": "SGD",
        "optim_args": {"lr": workload.learning_rate},
        "loss_fn": "CrossEntropyLoss",
        "metric_path": "mymodels.py",
        "metric_name": "accuracy",
        "train_batch_size": workload.batch_size,
        "optimize_memory": False,
    }
    return {
        "model_configs": {"model_path": "mymodels.py", "model_name": "network"},
        "algorithm_configs": {
            "trainer": "VanillaTrainer",
            "trainer_kwargs": training,
            "scheduler": "SyncScheduler",
            "aggregator": "FedAvgAggregator",
            "aggregator_kwargs": {"client_weights_mode": "equal"},
            "num_global_epochs": workload.rounds,
        },
        "server_configs": {"optimize_memory": False},
    }


def main() -> None:
    files, _processes = given()
    workload = files.workload
    torch.set_num_threads(1)
    Path("mymodels.py").write_text(OWN.format(module=str(files.folder.absolute() / "module.pt")))
    settings = settings_of(files)
    server = SimServerAgent(settings, num_clients=workload.devices)
    clients = [
        SimClientAgent(
            settings,
            client_id=f"d{device}",
            client_dataset=torch.utils.data.TensorDataset(*files.samples(device)),
        )
        for device in range(workload.devices)
    ]
    for client in clients:
        client.optimize_memory = False  # SimClientAgent does not read it from the settings
    driver = ReportingDriver(
        server,
        clients,
        {client.get_id(): ClientProfile() for client in clients},
        workload.participants,
        logging.getLogger("vsim"),
        target_rounds=workload.rounds,
    )
    driver.run()
    save(server.get_parameters(serial_run=True))


if __name__ == "__main__":
    main()
