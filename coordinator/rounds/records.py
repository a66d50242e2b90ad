"""Stored records of a run: one for each closed round, and totals of the traffic."""

from collections.abc import Sequence
from typing import Self

import msgspec
from msgspec import UNSET, Struct, UnsetType, field
from msgspec.structs import replace

from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.wire.payloads import Measures

MOST_RATIO, LEAST_COSINE = 3.0, -0.1
"""An update outside these limits is outlying, see docs/robust.md."""
Diagnostics = dict[str, float | dict[str, float]]
"""Diagnostics of a method by name: a number, or one number for each of several parts."""


class StepFigures(Struct, frozen=True, omit_defaults=True):
    """How an update's step from the shared model compares with the other updates of its round.

    Attributes:
        ratio: RMS of the step, divided by the round's median; None if that is 0.
        cosine: of the angle to the round's median step; None if one of them is 0.
        clipped: True if the step was clipped.
    """

    ratio: float | None = None
    cosine: float | None = None
    clipped: bool = False

    @property
    def is_outlying(self) -> bool:
        """True if the step is far longer than those of others, or points against them."""
        too_long = self.ratio is not None and self.ratio > MOST_RATIO
        return too_long or (self.cosine is not None and self.cosine < LEAST_COSINE)


class DeviceRound(Struct, frozen=True, omit_defaults=True):
    """One device's reply in one round.

    Attributes:
        ratio: model ratio at which the device trained.
        bytes_down, bytes_up: payload bytes, as the coordinator counted them.
        measures: scores and losses of its models.
        actual: measured cost of the round on the device.
        staleness: number of aggregations between its base model and the newest model.
        predicted: cost of the round as the device predicted it.
        diagnostics: the method's diagnostics of its update.
        local_work: share of the local training that the device did.
        encoding: encoding of its update, where the coordinator proposes encodings.
        counted_samples: weight of its update in samples, if `round.max_share` reduced it; None if all count.
        step: how its step compares with those of others; None if the method does not combine updates.
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
    step: StepFigures | None = None

    def with_late_cost(self, late: RoundCost) -> Self:
        """Return the record with the cost that the device reported after its reply had arrived."""
        upload_s = self.actual.upload_s if late.upload_s is None else late.upload_s
        return replace(self, actual=replace(self.actual, upload_s=upload_s, joules=late.joules))


class RoundRecord(Struct, frozen=True, omit_defaults=True):
    """One closed round; a line of rounds.jsonl.

    Attributes:
        number, attempt: round number and attempt.
        final_evaluation: True for the closing evaluation.
        opened_s, closed_s: seconds since the run began; simulated seconds in a simulation.
        participants: the selected devices; in semi-asynchronous runs, devices at work or with a reply.
        devices: the accepted replies.
        diagnostics: the method's diagnostics of its state after the round.
        epsilon: the largest epsilon of any device when the round closed; None without [privacy].
    """

    number: int
    attempt: int
    final_evaluation: bool
    opened_s: float
    closed_s: float
    participants: tuple[str, ...]
    devices: dict[str, DeviceRound]
    diagnostics: Diagnostics = field(default_factory=dict)
    epsilon: float | None = None


class Traffic(Struct):
    """Payload bytes of a device, counted where they were sent and received.

    `paper_down` and `paper_up` are the bytes of training rounds as papers count them.
    `delivered` is the round and attempt of the last counted task: each task counts once, however often it is
    sent again.
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
    """Sums over rounds whose records an open-ended run has dropped (`coordinator.extensions.downsampling`).

    Attributes:
        rounds: number of these rounds.
        joules, train_s, upload_s, download_s: sums over all replies that report them; None if none did.
    """

    rounds: int = 0
    joules: float | None = None
    train_s: float | None = None
    upload_s: float | None = None
    download_s: float | None = None


class Ledger(Struct):
    """Totals over a whole run: traffic, rejections, begin and end.

    Attributes:
        traffic: payload bytes by device.
        refusals: rejected messages and replies, by kind.
        refusals_by_device: rejected replies and too frequent messages, by device and kind.
        began_at, ended_at: times on the run's clock.
        past: sums over rounds whose records were dropped; UNSET if there are none.
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
        """Count a rejection by kind, and by device if a known device is at fault."""
        self.refusals[kind] = self.refusals.get(kind, 0) + times
        if device is not None:
            kinds = self.refusals_by_device.setdefault(device, {})
            kinds[kind] = kinds.get(kind, 0) + times


def lines_of(records: Sequence[RoundRecord]) -> bytes:
    """Return a line of JSON for each record."""
    return b"".join(msgspec.json.encode(record) + b"\n" for record in records)
