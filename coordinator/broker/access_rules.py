"""Who may write and read what on the embedded broker of one fleet; `protocols.wire.topics` says why.

A client is known by its user and its id. The coordinator has a user of its own. All devices share the user
`join` and its password: their client id is their name, and names their topics. So a device cannot touch
another's topics without taking its name, and whoever takes a name that is in use throws its owner off the
broker, which both see. A client id may carry a role behind a `~`, which no name holds: a second connection of
a device, to measure its link; it has a topic of its own.
"""

from fleetune.protocols.wire.topics import COORDINATOR_USER, JOIN_USER, ROOT

DEVICE_WRITES = ("state", "up", "update", "probe")
DEVICE_READS = ("down", "task", "probe")


def mosquitto_rules(fleet: str) -> str:
    """The content of mosquitto's `acl_file` on the embedded broker."""
    return fleet_rules(fleet, "%c")


def fleet_rules(fleet: str, who: str) -> str:
    """Rules for mosquitto's `acl_file`.

    Args:
        fleet: its name.
        who: what names a device: "%c", its client id, or "%u", its user.
    """
    below = f"{ROOT}/{fleet}"
    rules = [f"user {COORDINATOR_USER}", f"topic readwrite {below}/#", ""]
    for channel in sorted({*DEVICE_WRITES, *DEVICE_READS}):
        both = channel in DEVICE_WRITES and channel in DEVICE_READS
        access = "readwrite" if both else "write" if channel in DEVICE_WRITES else "read"
        rules.append(f"pattern {access} {below}/{who}/{channel}")
    return "\n".join(rules) + "\n"


def may(fleet: str, user: str | None, client: str, topic: str, *, write: bool) -> bool:
    """Whether a client may write to a topic or read it; a filter with wildcards is no device's topic."""
    if user == COORDINATOR_USER:
        return topic.startswith(f"{ROOT}/{fleet}/")
    if user != JOIN_USER or any(sign in client for sign in "/+#"):
        return False
    channels = DEVICE_WRITES if write else DEVICE_READS
    return any(topic == f"{ROOT}/{fleet}/{client}/{channel}" for channel in channels)
