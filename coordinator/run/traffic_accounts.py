"""Counts sent payloads: each task and each reply once, however often it was offered."""

from collections.abc import Callable

from fleetune.coordinator.rounds.records import Ledger, Traffic
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.wire.messages import TransferKey


class Accounts:
    """Counts of a run's traffic, kept up to date.

    Attributes:
        ledger: the counts.
        sent_bytes: bytes of the open round's task by device, until its reply has arrived.
    """

    def __init__(self, ledger: Ledger | None = None) -> None:
        self.ledger = Ledger() if ledger is None else ledger
        self.sent_bytes: dict[DeviceId, int] = {}
        self._touched: set[DeviceId] = set()

    def delivered(
        self, device: DeviceId, transfer_key: TransferKey, num_bytes: int, as_in_papers: Callable[[], float]
    ) -> None:
        """Count a payload that reached its device.

        `as_in_papers` returns a training task's size as papers count it.
        """
        traffic, round_attempt = self._of(device), transfer_key.round_attempt
        if transfer_key.kind in ("enrolment", "bundle", "backbone"):
            traffic.enrolment += num_bytes
            return
        if round_attempt >= traffic.delivered:
            self.sent_bytes[device] = num_bytes
        if round_attempt > traffic.delivered:
            traffic.delivered = round_attempt
            if transfer_key.final_evaluation:
                traffic.final_evaluation_down += num_bytes
            else:
                traffic.down += num_bytes
                traffic.tasks += 1
                traffic.paper_down += round(as_in_papers())

    def replied(self, device: DeviceId, num_bytes: int, as_in_papers: float | None) -> None:
        """Count a reply; `as_in_papers` is its update's size as papers count it, None in the final
        evaluation.
        """
        traffic = self._of(device)
        if as_in_papers is None:
            traffic.final_evaluation_up += num_bytes
        else:
            traffic.up += num_bytes
            traffic.updates += 1
            traffic.paper_up += round(as_in_papers)

    def roll_back(self, round_attempt: tuple[int, int]) -> None:
        """Count messages after this attempt again, because a closed round was rolled back."""
        for device, traffic in self.ledger.traffic.items():
            if traffic.delivered > round_attempt:
                number, attempt = round_attempt
                self._of(device).delivered = number, attempt

    def take_touched(self) -> set[DeviceId]:
        """Return the devices whose traffic changed since the last call."""
        touched, self._touched = self._touched, set()
        return touched

    def _of(self, device: DeviceId) -> Traffic:
        self._touched.add(device)
        return self.ledger.of(device)
