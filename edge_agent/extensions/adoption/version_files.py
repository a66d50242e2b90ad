"""What becomes of a device's versions as files, apart from the question which of them is the best."""

import logging

from fleetune.edge_agent.extensions.adoption.deployed_model import DeployedModel, ModelRecord, read_deployed
from fleetune.edge_agent.state.deployed_files import DeployedFiles
from fleetune.protocols.errors import PacketError, StoreError
from fleetune.protocols.files import remove

log = logging.getLogger(__name__)


def read_version(files: DeployedFiles, number: int) -> DeployedModel | None:
    """None: it is gone, or damaged, which is said."""
    try:
        return read_deployed(files.version(number).read())
    except (PacketError, StoreError) as problem:
        log.warning("version %d is left out: %s", number, problem)
        return None


def deploy_version(files: DeployedFiles, number: int) -> ModelRecord | None:
    """Put a version in the place of what is served, as it is; None: it is not there, or damaged.

    Raises:
        StoreError: it cannot be written; what was served before still is.
    """
    try:
        data = files.version(number).read()
        found = read_deployed(data)
    except PacketError:
        return None
    if data is None or found is None:
        return None
    files.served.write(data)
    return found.record


def keep_deployed_as_version(files: DeployedFiles, number: int) -> None:
    """What is served, a version of this number (0: none yet), becomes one to go back to, if it is not there.

    Raises:
        StoreError: it cannot be written.
    """
    data, numbers = files.served.read(), files.numbers
    is_there = number in numbers if number else any(files.version(one).read() == data for one in numbers)
    if data is not None and not is_there:
        files.version(number or max(numbers, default=0) + 1).write(data)


def withdraw_version(files: DeployedFiles, origin: tuple[object, ...]) -> None:
    """Remove the versions of this origin. If one is served, the newest of the others takes its place; where
    there is no other, nothing is served until there is.

    Raises:
        StoreError: it cannot be written.
    """
    served = read_deployed(files.served.read())
    for number in files.numbers:
        found = read_version(files, number)
        if found is not None and found.record.origin == origin:
            remove(files.version(number).path, durable=files.durable)
    if served is None or served.record.origin != origin:
        return
    log.warning("withdrawn, by the coordinator: %s", served.record.words)
    left = files.numbers
    back = deploy_version(files, left[-1]) if left else None
    if back is None:
        remove(files.served.path, durable=files.durable)
    else:
        log.info("served from now on: %s", back.words)


def newest_of_another_run(files: DeployedFiles, run: str) -> DeployedModel | None:
    """The newest version that another run led to; None: there is none."""
    versions = (read_version(files, number) for number in reversed(files.numbers))
    return next((one for one in versions if one and one.record.run != run), None)
