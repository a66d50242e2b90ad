"""No framework: a plain loop over the participants in one process."""

import numpy as np
import torch
from workload_files import device, given, round_over, save, train


def main() -> None:
    torch.set_num_threads(1)
    files, _ = given()
    workload, module, draw = files.workload, files.module().to(device()), np.random.default_rng(0)
    shared = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    for number in range(1, workload.rounds + 1):
        sums = {name: torch.zeros_like(tensor) for name, tensor in shared.items()}
        for user in draw.choice(workload.devices, workload.participants, replace=False):
            module.load_state_dict(shared)
            train(module, *files.samples(user), workload, seed=number * workload.devices + int(user))
            for name, tensor in module.state_dict().items():
                sums[name] += tensor
        shared = {name: tensor / workload.participants for name, tensor in sums.items()}
        round_over(number)
    save(shared)


if __name__ == "__main__":
    main()
