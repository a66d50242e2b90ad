"""Checks devices' reports and offers before the run controller receives them."""

from functools import partial

from fleetune.coordinator.rounds.engine_state import RoundAttempt
from fleetune.coordinator.run.stored_run import Run
from fleetune.coordinator.serving.device_sessions import DeviceSession, DeviceSessions
from fleetune.coordinator.serving.disk_space import no_space_reason
from fleetune.coordinator.store.run_folder import INCOMING
from fleetune.protocols.errors import PacketForeign
from fleetune.protocols.update import codec
from fleetune.protocols.wire.messages import Ready, TransferKey


def open_session(run: Run, device: str, sessions: DeviceSessions) -> DeviceSession:
    """Create the session of a device that sent its first message."""
    limit, folder = codec.payload_limit(run.enrolment.spec), run.folder / INCOMING / device
    objects, lacks = (
        partial(offer_rejection, run, device),
        partial(no_space_reason, sessions=sessions, folder=run.folder),
    )
    session = DeviceSession.opened(device, folder, limit, objects, sessions.memory, lacks)
    sessions[device] = session
    return session


def check_ready(ready: Ready, session: DeviceSession, run: Run) -> None:
    """Check that a device's report is plausible and comes from an enrolled device.

    Any client can invent a device name. So a report counts only if the device is present at the broker and
    has confirmed the enrolment that was sent to its own topic.

    Raises:
        PacketForeign: the report names another device or model, or the device was not enrolled.
        PacketError: an extension of the run rejects the report (`coordinator.extensions`).
    """
    report, model = ready.report, run.enrolment.spec.hash
    if report.device != session.device:
        raise PacketForeign(f"the report names another device: {report.device!r}")
    if ready.model_hash != model:
        raise PacketForeign(f"the report is for model {ready.model_hash!r}, but the run's model is {model}")
    run.controller.admit(report)
    if not (session.online and session.enrolled):
        raise PacketForeign("the device reports ready, but it was not enrolled")


def check_decline(number: int, session: DeviceSession, run: Run) -> None:
    """Check that a device that declines the whole run (round 0) was enrolled, because the answer is stored.

    Raises:
        PacketForeign: the device was not enrolled.
    """
    known = session.device in run.controller.members
    if number == 0 and not known and not (session.online and session.enrolled):
        raise PacketForeign("the device declines the run, but it was not enrolled")


def offer_rejection(run: Run, device: str, key: TransferKey) -> str | None:
    """Return why an offer is rejected before any byte of it is sent; None if it is accepted."""
    if key.kind != "update":
        return f"a coordinator takes no {key.kind}"
    if key.run != run.enrolment.run:
        return f"run {key.run!r} is not the one that runs here"
    rejection = run.controller.rejection(device, RoundAttempt.of(key))
    return None if rejection is None else f"{rejection}: round {key.round} does not wait for it"
