"""No framework: a loop over the round's devices in one process, as one writes it for an afternoon."""

import numpy as np
import torch
from workload_files import device, given, round_over, save, train


def main() -> None:
    torch.set_num_threads(1)
    files, _ = given()
    asked, module, draw = files.asked, files.module().to(device()), np.random.default_rng(0)
    shared = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    for number in range(1, asked.rounds + 1):
        sums = {name: torch.zeros_like(tensor) for name, tensor in shared.items()}
        for who in draw.choice(asked.devices, asked.participants, replace=False):
            module.load_state_dict(shared)
            train(module, *files.samples(who), asked, seed=number * asked.devices + int(who))
            for name, tensor in module.state_dict().items():
                sums[name] += tensor
        shared = {name: tensor / asked.participants for name, tensor in sums.items()}
        round_over(number)
    save(shared)


if __name__ == "__main__":
    main()
