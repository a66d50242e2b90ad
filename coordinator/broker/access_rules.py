"""Access rules of the embedded broker of one fleet: who may read and write which topics.

A client is identified by its user and its client id. The coordinator has its own user. All devices share the
user `join` and its password. A device's client id is its name, and its name is part of its topics. So a
device can only use another device's topics by taking its name, which disconnects that device and is visible
to both. A client id may end with `~` and a role: a device's second connection, which measures its link and
has its own topic. `protocols.wire.topics` explains the topics.
"""

from fleetune.protocols.wire.topics import COORDINATOR_USER, JOIN_USER, ROOT

DEVICE_WRITES = ("state", "up", "update", "probe")
DEVICE_READS = ("down", "task", "probe")


def mosquitto_rules(fleet: str) -> str:
    """The content of mosquitto's `acl_file` for the embedded broker."""
    return fleet_rules(fleet, "%c")


def fleet_rules(fleet: str, who: str) -> str:
    """Rules for mosquitto's `acl_file`.

    Args:
        fleet: name of the fleet.
        who: what identifies a device: "%c", its client id, or "%u", its user.
    """
    below = f"{ROOT}/{fleet}"
    rules = [f"user {COORDINATOR_USER}", f"topic readwrite {below}/#", ""]
    for channel in sorted({*DEVICE_WRITES, *DEVICE_READS}):
        both = channel in DEVICE_WRITES and channel in DEVICE_READS
        access = "readwrite" if both else "write" if channel in DEVICE_WRITES else "read"
        rules.append(f"pattern {access} {below}/{who}/{channel}")
    return "\n".join(rules) + "\n"


def may(fleet: str, user: str | None, client: str, topic: str, *, write: bool) -> bool:
    """True if a client may write to (or read) a topic. Filters with wildcards match no device's topic."""
    if user == COORDINATOR_USER:
        return topic.startswith(f"{ROOT}/{fleet}/")
    if user != JOIN_USER or any(sign in client for sign in "/+#"):
        return False
    channels = DEVICE_WRITES if write else DEVICE_READS
    return any(topic == f"{ROOT}/{fleet}/{client}/{channel}" for channel in channels)
