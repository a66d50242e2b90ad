"""What becomes of a device's versions as files, apart from the question which of them is the best."""

import logging

from fleetune.edge_agent.personal.served_model import Served, Standing, read_served
from fleetune.edge_agent.state.served_files import ServedFiles
from fleetune.protocols.errors import PacketError, StoreError
from fleetune.protocols.files import remove

log = logging.getLogger(__name__)


def read_version(files: ServedFiles, number: int) -> Served | None:
    """None: it is gone, or damaged, which is said."""
    try:
        return read_served(files.version(number).read())
    except (PacketError, StoreError) as problem:
        log.warning("version %d is left out: %s", number, problem)
        return None


def serve_version(files: ServedFiles, number: int) -> Standing | None:
    """Put a version in the place of what is served, as it is; None: it is not there, or damaged.

    Raises:
        StoreError: it cannot be written; what was served before still is.
    """
    try:
        data = files.version(number).read()
        found = read_served(data)
    except PacketError:
        return None
    if data is None or found is None:
        return None
    files.served.write(data)
    return found.standing


def keep_as_it_is(files: ServedFiles, number: int) -> None:
    """What is served, a version of this number (0: none yet), becomes one to go back to, if it is not there.

    Raises:
        StoreError: it cannot be written.
    """
    data, numbers = files.served.read(), files.numbers
    is_there = number in numbers if number else any(files.version(one).read() == data for one in numbers)
    if data is not None and not is_there:
        files.version(number or max(numbers, default=0) + 1).write(data)


def withdraw_version(files: ServedFiles, origin: tuple[object, ...]) -> None:
    """Remove the versions of this origin. If one is served, the newest of the others takes its place; where
    there is no other, nothing is served until there is.

    Raises:
        StoreError: it cannot be written.
    """
    served = read_served(files.served.read())
    for number in files.numbers:
        found = read_version(files, number)
        if found is not None and found.standing.origin == origin:
            remove(files.version(number).path, durable=files.durable)
    if served is None or served.standing.origin != origin:
        return
    log.warning("withdrawn, by the coordinator: %s", served.standing.words)
    left = files.numbers
    back = serve_version(files, left[-1]) if left else None
    if back is None:
        remove(files.served.path, durable=files.durable)
    else:
        log.info("served from now on: %s", back.words)


def newest_of_another_run(files: ServedFiles, run: str) -> Served | None:
    """The newest version that another run led to; None: there is none."""
    versions = (read_version(files, number) for number in reversed(files.numbers))
    return next((one for one in versions if one and one.standing.run != run), None)
