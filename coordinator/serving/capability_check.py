"""Checks that an agent can read everything that the run sends; no other module checks this."""

from collections.abc import Sequence

from msgspec import UNSET

from fleetune.coordinator.serving.device_sessions import DeviceSession
from fleetune.coordinator.tasks.downlink import LOSSLESS
from fleetune.protocols.update.encodings import RAW
from fleetune.protocols.wire.capabilities import Features
from fleetune.protocols.wire.payloads import Enrolment


def features_needed(enrolment: Enrolment) -> Features:
    """Return the features that an agent needs to take part in a run.

    Message formats are not included, because the coordinator sends compact messages only to agents that read
    them. Operators of the run's bundle are checked later, when an agent asks for the bundle.
    """
    down = enrolment.downlink.name
    # the coordinator also writes tasks lossless (`coordinator.tasks.downlink`), and encodes their masks
    for_tasks = () if down == RAW else (down, LOSSLESS)
    names = dict.fromkeys((*for_tasks, *(one.name for one in enrolment.uplinks)))
    return Features(
        encodings=tuple(name for name in names if name != RAW),
        masks=("coded",) if for_tasks else (),
        updates=() if enrolment.privacy is UNSET else ("private",),
    )


def refusal_of(session: DeviceSession, needed: Features, alternatives: Sequence[str] = ()) -> str | None:
    """Return the features that a device's agent lacks, as a reason to refuse it; None if it lacks none."""
    lacking = needed.without(session.reads.features)
    if not lacking:
        return None
    remedy = ", or ".join(("update its agent", *alternatives))
    return f"device {session.identity} lacks {lacking}; {remedy}"
