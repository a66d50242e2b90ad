"""Chooses where simulated devices train: in processes of this machine, or on the nodes of a Ray cluster."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import NamedTuple

from fleetune.protocols.errors import SettingError

ALL_CORES = os.cpu_count() or 1
WORKERS_A_CARD = 4  # each has its own copy of torch's kernels on the GPU, some hundred megabytes


class Engine(StrEnum):
    """The machines on which simulated devices train."""

    LOCAL = "local"
    RAY = "ray"


class Workers(NamedTuple):
    """The number of workers, and the address of their Ray cluster; None if they are on this machine."""

    workers: int
    cluster: str | None


@contextmanager
def open_workers(
    engine: str, address: str | None, workers: int | None, num_cards: int = 0
) -> Iterator[Workers]:
    """Yield the workers of a command; a Ray cluster that was started for it ends with the block.

    Args:
        engine: one of `Engine`.
        address: address of the Ray cluster; None: $RAY_ADDRESS, and without it a cluster is started on this
            machine.
        workers: number of workers; None means one for each core, or a few for each GPU.
        num_cards: number of GPUs that the workers share; 0 trains on processors.

    Raises:
        SettingError: the engine is unknown, address and engine do not match, Ray is not installed, or there
            is no such cluster.
    """
    if engine not in list(Engine):
        raise SettingError(f"--engine {engine} is unknown: use one of {', '.join(Engine)}")
    if engine == Engine.LOCAL:
        if address is not None:
            raise SettingError("--address names a Ray cluster, but the engine is local: add --engine ray")
        most = min(ALL_CORES, WORKERS_A_CARD * num_cards) if num_cards else ALL_CORES
        yield Workers(most if workers is None else workers, None)
        return
    if workers is not None and workers < 1:
        raise SettingError(f"--workers {workers}: --engine ray needs at least 1 worker")
    from fleetune.tools.simulator.ray_engine.cluster import cluster
    from fleetune.tools.simulator.ray_engine.ray_workers import end_spare_workers

    with cluster(address, workers or ALL_CORES) as found:
        try:
            yield Workers(workers or max(1, found.num_cpus), found.address)
        finally:
            end_spare_workers()
