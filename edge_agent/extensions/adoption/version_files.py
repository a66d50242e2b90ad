"""Reads, deploys and removes the files of a device's versions. The adoption rule chooses the version."""

import logging

from fleetune.edge_agent.extensions.adoption.deployed_model import DeployedModel, ModelRecord, read_deployed
from fleetune.edge_agent.state.deployed_files import DeployedFiles
from fleetune.protocols.errors import PacketError, StoreError
from fleetune.protocols.files import remove

log = logging.getLogger(__name__)


def read_version(files: DeployedFiles, number: int) -> DeployedModel | None:
    """Read a version; None if it is missing or damaged. A damaged file is logged."""
    try:
        return read_deployed(files.version(number).read())
    except (PacketError, StoreError) as problem:
        log.warning("version %d is not used: %s", number, problem)
        return None


def deploy_version(files: DeployedFiles, number: int) -> ModelRecord | None:
    """Deploy a version unchanged and return its record; None if it is missing or damaged.

    Raises:
        StoreError: the file cannot be written; the deployed model stays.
    """
    try:
        data = files.version(number).read()
        found = read_deployed(data)
    except PacketError:
        return None
    if data is None or found is None:
        return None
    files.deployed.write(data)
    return found.record


def keep_deployed_as_version(files: DeployedFiles, number: int) -> None:
    """Store the deployed model as a version if it is not one yet, so that the device can go back to it.

    Args:
        files: files of the deployed model and its versions.
        number: number of the version; 0 if it has none yet.

    Raises:
        StoreError: the file cannot be written.
    """
    data, numbers = files.deployed.read(), files.numbers
    is_there = number in numbers if number else any(files.version(one).read() == data for one in numbers)
    if data is not None and not is_there:
        files.version(number or max(numbers, default=0) + 1).write(data)


def withdraw_version(files: DeployedFiles, origin: tuple[object, ...]) -> None:
    """Remove the versions of this origin. If one is deployed, the newest other version replaces it.

    If there is no other version, the device deploys no model until it has one.

    Raises:
        StoreError: a file cannot be written.
    """
    deployed = read_deployed(files.deployed.read())
    for number in files.numbers:
        found = read_version(files, number)
        if found is not None and found.record.origin == origin:
            remove(files.version(number).path, durable=files.durable)
    if deployed is None or deployed.record.origin != origin:
        return
    log.warning("withdrawn by the coordinator: %s", deployed.record.words)
    left = files.numbers
    back = deploy_version(files, left[-1]) if left else None
    if back is None:
        remove(files.deployed.path, durable=files.durable)
    else:
        log.info("deployed from now on: %s", back.words)


def newest_of_another_run(files: DeployedFiles, run: str) -> DeployedModel | None:
    """Return the newest version of another run; None if there is none."""
    versions = (read_version(files, number) for number in reversed(files.numbers))
    return next((one for one in versions if one and one.record.run != run), None)
