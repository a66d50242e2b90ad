"""Connects a command to a Ray cluster: an existing cluster, or one that ends with the command."""

import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from fleetune.protocols.errors import SettingError
from fleetune.protocols.one_line import flat

NO_RAY = "--engine ray needs Ray, which is not installed here: pip install ray"
_TO_REACH_S = 10.0
_OWN = "local"  # the address with which Ray starts a new cluster
_OF_OUR_CLUSTER = {
    "RAY_USAGE_STATS_ENABLED": "0",  # disable Ray's usage reports
    "RAY_worker_niceness": "0",  # its workers have the same priority as worker processes
}
_QUIET = {"log_to_driver": False, "logging_level": "error", "include_dashboard": False}


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster that this process is connected to.

    Attributes:
        address: address of its head.
        num_cpus: processors of all its nodes, as they report them.
    """

    address: str
    num_cpus: int


@contextmanager
def cluster(address: str | None, num_cpus: int) -> Iterator[Cluster]:
    """Connect to a cluster for the length of the block; yield the cluster.

    A connection that this process already has, as in a notebook, is used and stays open.

    Args:
        address: address of a running cluster, or "auto"; None: $RAY_ADDRESS, and without it a cluster on this
            machine that ends with the block.
        num_cpus: number of processors of a cluster that is started here.

    Raises:
        SettingError: Ray is not installed, or there is no such cluster.
    """
    ray = imported()
    if ray.is_initialized():
        yield _of_this_process(ray, address)
        return
    address = address or os.environ.get("RAY_ADDRESS") or None
    try:
        if address is None:
            _begin(ray, address=_OWN, num_cpus=num_cpus)
        else:
            _check_reached(address)
            _begin(ray, address=address)
        yield _of_this_process(ray, None)
    finally:
        ray.shutdown()


def _of_this_process(ray: ModuleType, address: str | None) -> Cluster:
    """Return the cluster to which this process is connected. Raises SettingError if its address differs."""
    there = ray.get_runtime_context().gcs_address
    if address not in (None, "auto", there):
        raise SettingError(
            f"--address {address}: this process is already connected to the Ray cluster at {there}; use that"
            " address"
        )
    return Cluster(there, int(ray.cluster_resources().get("CPU", 0)))


def _check_reached(address: str) -> None:
    """Raise SettingError if the address cannot be reached, because Ray itself would try for minutes."""
    host, separator, port = address.rpartition(":")
    if not (separator and port.isdecimal() and "/" not in host):
        return  # for example "auto"
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_TO_REACH_S).close()
    except OSError as problem:
        raise SettingError(
            f"cannot reach a Ray cluster at {address}: {problem.strerror or problem}"
        ) from None


def join(address: str) -> ModuleType:
    """Connect this process to a cluster; return the module `ray`.

    Raises:
        SettingError: Ray is not installed, or there is no such cluster.
    """
    ray = imported()
    if not ray.is_initialized():
        _begin(ray, address=address)
    return ray


def imported() -> ModuleType:
    """Return the module `ray`. Raises SettingError if it is not installed."""
    for name, value in _OF_OUR_CLUSTER.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise SettingError(NO_RAY) from None
    logging.getLogger("ray").setLevel(logging.ERROR)  # `ray.init` would report this error much later
    module: ModuleType = ray
    return module


def _begin(ray: ModuleType, **how: Any) -> None:
    """Call `ray.init`, and restore the handler of SIGTERM, which Ray replaces."""
    heard = signal.getsignal(signal.SIGTERM)
    options = _QUIET if how["address"] == _OWN else {key: _QUIET[key] for key in list(_QUIET)[:2]}
    try:
        ray.init(**how, **options)
    except Exception as problem:  # noqa: BLE001 - ConnectionError, RuntimeError, ValueError and others
        what = (
            "cannot start Ray here"
            if how["address"] == _OWN
            else f"cannot reach a Ray cluster at {how['address']}"
        )
        raise SettingError(f"{what}: {flat(problem)[:300]}") from None
    finally:
        signal.signal(signal.SIGTERM, heard)
