"""Flower: its simulation runtime on Ray, one client at a time on each processor, without evaluation."""

import os

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from workload_files import Files, given, round_over, save, train

client_app, server_app = ClientApp(), ServerApp()
kept: dict[str, Files] = {}  # state of an actor, which is reused in all rounds


@client_app.train()
def trained(message: Message, context: Context) -> Message:
    """Train one client in one round."""
    torch.set_num_threads(1)
    folder = str(message.content["config"]["folder"])
    files = kept[folder] = kept.get(folder) or Files(folder)
    device, module = int(context.node_config["partition-id"]), files.module()
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    seed = int(message.content["config"]["server-round"]) * files.workload.devices + device
    train(module, *files.samples(device), files.workload, seed)
    metrics = MetricRecord({"num-examples": len(files.rows[device])})
    content = RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


@server_app.main()
def serve(grid: Grid, _: Context) -> None:
    """Run all rounds."""
    files, _processes = given()
    workload = files.workload
    strategy = FedAvg(
        fraction_train=workload.participants / workload.devices,
        fraction_evaluate=0.0,
        min_train_nodes=workload.participants,
        min_available_nodes=workload.devices,
    )
    result = strategy.start(
        grid,
        ArrayRecord(files.module().state_dict()),
        num_rounds=workload.rounds,
        train_config=ConfigRecord({"folder": str(files.folder)}),
        evaluate_fn=lambda number, _: round_over(number) if number else None,
    )
    save(result.arrays.to_torch_state_dict())


def main() -> None:
    files, processes = given()
    resources = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": processes}}
    run_simulation(server_app, client_app, num_supernodes=files.workload.devices, backend_config=resources)


if __name__ == "__main__":
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    main()
