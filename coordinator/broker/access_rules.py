"""Access rules of a fleet in mosquitto's format (`acl_file`): which user may write and read which topics.

A device's user has the device's id, so that it reaches its own topics only. `DEVICE~probe` is the user of the
device's second connection, which measures the link. `protocols.wire.topics` explains the topics.
"""

from fleetune.protocols.wire.topics import COORDINATOR_USER, ROOT

DEVICE_WRITES = ("state", "up", "update", "probe")
DEVICE_READS = ("down", "task", "probe")


def fleet_rules(fleet: str) -> str:
    """Return the rules of the coordinator and of all devices."""
    return f"{coordinator_rules(fleet)}\n{device_rules(fleet)}"


def coordinator_rules(fleet: str) -> str:
    """Return the rules of the coordinator's user."""
    return f"user {COORDINATOR_USER}\ntopic readwrite {ROOT}/{fleet}/#\n"


def device_rules(fleet: str) -> str:
    """Return the rules of the devices; mosquitto replaces `%u` by the user."""
    rules = []
    for channel in sorted({*DEVICE_WRITES, *DEVICE_READS}):
        both = channel in DEVICE_WRITES and channel in DEVICE_READS
        access = "readwrite" if both else "write" if channel in DEVICE_WRITES else "read"
        rules.append(f"pattern {access} {ROOT}/{fleet}/%u/{channel}\n")
    return "".join(rules)


def may_write(fleet: str, device: str, topic: str) -> bool:
    """True if a device may write to a topic."""
    return topic in {f"{ROOT}/{fleet}/{device}/{channel}" for channel in DEVICE_WRITES}


def may_read(fleet: str, device: str, filter_: str) -> bool:
    """True if a device may read the topics of a filter. It needs no wildcards."""
    return filter_ in {f"{ROOT}/{fleet}/{device}/{channel}" for channel in DEVICE_READS}
