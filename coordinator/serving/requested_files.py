"""Sends the bundle and the backbone of a run's model to devices that ask for them."""

from dataclasses import dataclass

from msgspec import UNSET

import fleetune.protocols.wire.messages as wire
from fleetune.coordinator.rounds.events import RoundsEnded
from fleetune.coordinator.run.stored_run import Run
from fleetune.coordinator.serving.bundle_server import BundleMade, BundleServer
from fleetune.coordinator.serving.capability_check import refusal_of
from fleetune.coordinator.serving.device_sessions import DeviceSession, DeviceSessions
from fleetune.coordinator.serving.task_exchange import TaskExchange
from fleetune.coordinator.store.stored_backbone import backbone_payload
from fleetune.coordinator.store.troubles import note_trouble
from fleetune.protocols.errors import PacketForeign
from fleetune.protocols.wire.messages import TransferKey

NO_TRAINER_S = 60.0  # the time that a run without a bundle waits for a device with torch


@dataclass
class RequestedFiles:
    """Sends the bundle and the backbone, and ends a run that no device can train.

    Attributes:
        run: the run.
        sessions: the sessions of all devices.
        exchange: sends payloads, and reports the end of the run.
        bundles: makes the bundle.
    """

    run: Run
    sessions: DeviceSessions
    exchange: TaskExchange
    bundles: BundleServer
    _end_at: float | None = None  # the time at which a run that no device can train ends

    def send(self, session: DeviceSession, what: str) -> None:
        """Send the bundle, or the backbone, to a device that asks for it.

        Raises:
            PacketForeign: the run's model has no backbone; StoreError: a file cannot be read.
        """
        if self.exchange.asks_too_often(session, f"for the {what}"):
            return
        if what == "bundle":
            made = self.bundles.ask(session.device)
            if made is not None:  # otherwise it is sent when it is made
                self._send_bundle(session, made)
        else:
            self._send_backbone(session)

    def note_made(self, event: BundleMade) -> None:
        """Store the finished bundle, or the reason why it cannot be made, and answer the waiting devices."""
        waiting = self.bundles.made(event)
        note_trouble(self.run.store, "bundle", self.bundles.problem_line)
        for device in waiting & self.sessions.keys():
            self._send_bundle(self.sessions[device], event)

    def end_if_untrainable(self, now: float) -> None:
        """End the run if its bundle cannot be made and no device that can train came for `NO_TRAINER_S`."""
        problem, state = self.bundles.problem_line, self.run.controller.engine_state
        others = any(one.online and one.device not in state.members for one in self.sessions.values())
        if problem is None or state.groups.staying or others or not state.members or state.running:
            self._end_at = None
            return
        self._end_at = self._end_at or now + NO_TRAINER_S
        if now >= self._end_at:
            self.exchange.report(RoundsEnded(f"no device can train: {problem}"))

    def _send_bundle(self, session: DeviceSession, made: BundleMade) -> None:
        problem = made.problem or refusal_of(session, made.needed, ["train there with torch"])
        if made.payload is None or problem:
            lacking = wire.Lacking(self.run.enrolment.run, wire.readable(problem or ""))
            self.exchange.transfers.publish(session, session.link.packet(lacking))
            return
        key = TransferKey("bundle", self.run.enrolment.run)
        self.exchange.advance(session, session.link.post(key, made.payload, self.exchange.timer()))

    def _send_backbone(self, session: DeviceSession) -> None:
        spec = self.run.enrolment.spec
        if spec.backbone is UNSET:
            raise PacketForeign("the device asks for a backbone, but the run's model has no frozen layers")
        payload = backbone_payload(self.run.folder, spec)
        key = TransferKey("backbone", self.run.enrolment.run)
        self.exchange.advance(session, session.link.post(key, payload, self.exchange.timer()))
