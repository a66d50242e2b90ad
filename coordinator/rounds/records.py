"""What is written down of a run: a record of each round, and what crossed the wire."""

from collections.abc import Sequence
from typing import Self

import msgspec
from msgspec import UNSET, Struct, UnsetType, field
from msgspec.structs import replace

from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.wire.payloads import Measures

Diagnostics = dict[str, float | dict[str, float]]
"""Figures of a method's inner workings by name: a number, or one for each part of several."""


class DeviceRound(Struct, frozen=True, omit_defaults=True):
    """One device's reply in one round.

    Attributes:
        ratio: that it worked at.
        bytes_down, bytes_up: payload bytes as the coordinator counted them.
        measures: of its models.
        actual: what the round took of it.
        staleness: by how many aggregations the model it trained from was older than the newest.
        predicted: what it expected the round to take.
        diagnostics: what the method tells of its update.
        local_work: the share of the local training that it did.
        encoding: that its update was asked for by, where the coordinator proposes encodings.
        counted_samples: that its update counted as, where `round.max_share` cut them; None: all.
    """

    ratio: float
    bytes_down: int
    bytes_up: int
    measures: Measures
    actual: RoundCost
    staleness: int = 0
    predicted: RoundCost = RoundCost()
    diagnostics: Diagnostics = field(default_factory=dict)
    local_work: float = 1.0
    encoding: str = ""
    counted_samples: int | None = None

    def with_late_cost(self, late: RoundCost) -> Self:
        """The same with what the device reported after its reply had arrived."""
        upload_s = self.actual.upload_s if late.upload_s is None else late.upload_s
        return replace(self, actual=replace(self.actual, upload_s=upload_s, joules=late.joules))


class RoundRecord(Struct, frozen=True, omit_defaults=True):
    """One round that was closed; a line of rounds.jsonl.

    Attributes:
        number, attempt: which.
        final_evaluation: the closing evaluation.
        opened_s, closed_s: since the run began; simulated seconds in a simulation.
        participants: the devices that were asked; semi-asynchronously, that were at work or had replied.
        devices: the replies that count.
        diagnostics: what the method tells of its state after the round.
    """

    number: int
    attempt: int
    final_evaluation: bool
    opened_s: float
    closed_s: float
    participants: tuple[str, ...]
    devices: dict[str, DeviceRound]
    diagnostics: Diagnostics = field(default_factory=dict)


class Traffic(Struct):
    """Payload bytes of a device as counted where they were sent and received.

    `paper_down` and `paper_up` are those of training rounds as papers count them.
    `delivered` is the round and attempt of the last task that was counted: each counts once, however
    often it was offered again.
    """

    enrolment: int = 0
    down: int = 0
    up: int = 0
    final_evaluation_down: int = 0
    final_evaluation_up: int = 0
    tasks: int = 0
    updates: int = 0
    paper_down: int = 0
    paper_up: int = 0
    delivered: tuple[int, int] = (0, 0)


class Past(Struct, frozen=True, omit_defaults=True):
    """What an open run let go of, added up; see `coordinator.extensions.downsampling`.

    Attributes:
        rounds: how many.
        joules, train_s, upload_s, download_s: of all their replies that tell them; None: none did.
    """

    rounds: int = 0
    joules: float | None = None
    train_s: float | None = None
    upload_s: float | None = None
    download_s: float | None = None


class Ledger(Struct):
    """Counts over a whole run.

    Attributes:
        traffic: by device.
        refusals: what the peers sent that was refused or does not count, by kind.
        refusals_by_device: replies that were refused, and what a device said too often, by device and kind.
        began_at, ended_at: on the run's clock.
        past: of rounds whose records an open run has let go of; UNSET: of none.
    """

    traffic: dict[str, Traffic] = field(default_factory=dict)
    refusals: dict[str, int] = field(default_factory=dict)
    refusals_by_device: dict[str, dict[str, int]] = field(default_factory=dict, name="turned_away")
    began_at: float | None = None
    ended_at: float | None = None
    past: Past | UnsetType = UNSET

    def of(self, device: str) -> Traffic:
        return self.traffic.setdefault(device, Traffic())

    def refuse(self, kind: str, times: int = 1, *, device: str | None = None) -> None:
        """Count it by its kind; by its device too, where that is known and the fault is its own."""
        self.refusals[kind] = self.refusals.get(kind, 0) + times
        if device is not None:
            kinds = self.refusals_by_device.setdefault(device, {})
            kinds[kind] = kinds.get(kind, 0) + times


def lines_of(records: Sequence[RoundRecord]) -> bytes:
    """A line of JSON for each record."""
    return b"".join(msgspec.json.encode(record) + b"\n" for record in records)
