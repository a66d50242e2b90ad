"""Access rules of one fleet's embedded broker: which client may read and write which topics.

A client is identified by its user and its client id. The coordinator has its own user. All devices share the
user `join` and its password. A device's client id is its name, and its topics contain its name. So a device
can use another device's topics only under that device's name. The broker then disconnects the other device,
and both notice it. A client id that ends with `~` and a role belongs to a device's second connection, which
measures the link and has its own topic. `protocols.wire.topics` explains the topics.
"""

from fleetune.protocols.wire.topics import COORDINATOR_USER, JOIN_USER, ROOT

DEVICE_WRITES = ("state", "up", "update", "probe")
DEVICE_READS = ("down", "task", "probe")


def mosquitto_rules(fleet: str) -> str:
    """Return the content of mosquitto's `acl_file` for the embedded broker."""
    return fleet_rules(fleet, "%c")


def fleet_rules(fleet: str, who: str) -> str:
    """Return the access rules of a fleet in the format of mosquitto's `acl_file`.

    Args:
        fleet: name of the fleet.
        who: the identifier of a device in topics: "%c" for its client id, "%u" for its user.
    """
    below = f"{ROOT}/{fleet}"
    rules = [f"user {COORDINATOR_USER}", f"topic readwrite {below}/#", ""]
    for channel in sorted({*DEVICE_WRITES, *DEVICE_READS}):
        both = channel in DEVICE_WRITES and channel in DEVICE_READS
        access = "readwrite" if both else "write" if channel in DEVICE_WRITES else "read"
        rules.append(f"pattern {access} {below}/{who}/{channel}")
    return "\n".join(rules) + "\n"


def may(fleet: str, user: str | None, client: str, topic: str, *, write: bool) -> bool:
    """True if a client may write to a topic (or read it). Filters with wildcards match no device's topic."""
    if user == COORDINATOR_USER:
        return topic.startswith(f"{ROOT}/{fleet}/")
    if user != JOIN_USER or any(sign in client for sign in "/+#"):
        return False
    channels = DEVICE_WRITES if write else DEVICE_READS
    return any(topic == f"{ROOT}/{fleet}/{client}/{channel}" for channel in channels)
