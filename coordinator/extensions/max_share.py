"""The largest share that one update may have in a round's mean (`round.max_share`)."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from fractions import Fraction
from typing import Any, Self

from fleetune.coordinator.extensions.extension import ClosedRound, Extension, RoundUpdates, RunContext
from fleetune.coordinator.rounds.records import DeviceRound
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.wire.payloads import Reply

log = logging.getLogger(__name__)


class MaxShare(Extension):
    """Limits the weight of each update in a round's mean, and records which updates it limited.

    Args:
        limit: `round.max_share`.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        # of the open round's replies, so that they need not be read again
        self._samples: dict[DeviceId, int] = {}
        self._counted: dict[DeviceId, int] = {}  # samples that each limited update counted as last
        self._logged: set[DeviceId] = set()

    @classmethod
    def of_run(cls, run: RunContext) -> Self | None:
        limit = run.settings.round.max_share
        return cls(limit) if limit < 1 and run.method.weighs_by_samples else None

    def record(self, reply: Reply[Any], row: DeviceRound) -> DeviceRound:
        self._samples[reply.device] = samples_of(reply)
        return row

    def weigh(self, replies: Iterator[Reply[Any]], round_: RoundUpdates) -> Iterator[Reply[Any]]:
        for device in round_.devices:
            if device not in self._samples:  # an earlier process recorded it
                self._samples[device] = samples_of(round_.reply_of(device))
        claimed = {device: self._samples[device] for device in round_.devices}
        counted = self._counted = samples_cut(claimed, self._limit)
        for reply in replies:
            samples = counted.get(reply.device)
            update: Any = reply.update
            if samples is not None and update.num_samples:  # one in quarantine has none
                update = replace(update, num_samples=samples)
            weighed = replace(reply, update=update)
            del reply, update  # before the next one is read
            yield weighed
            del weighed

    def after_round(self, closed: ClosedRound) -> Iterable[str]:
        if closed.record.final_evaluation:
            return ()
        for device, counted in self._counted.items():
            closed.amend(device, counted_samples=counted)
            closed.ledger.refuse("share-cut", device=device)
            if device not in self._logged:
                self._logged.add(device)
                log.warning(
                    "round %d: %s claims %d samples, which is more than round.max_share allows;"
                    " its update counts as %d",
                    *(closed.record.number, device, self._samples[device], counted),
                )
        self._samples.clear()
        return ()


def samples_of(reply: Reply[Any]) -> int:
    """Return the number of training samples behind a reply's update; 0 if the reply claims none."""
    update: Any = reply.update
    has_samples = update is not None and any(one.name == "num_samples" for one in fields(update))
    return update.num_samples if has_samples else 0


def samples_cut(claimed: Mapping[DeviceId, int], max_share: float) -> dict[DeviceId, int]:
    """Return the updates whose weight is reduced, each with the number of samples that counts instead.

    Of n updates with samples, one may have the share max(`max_share`, 2 / n) of all samples. What is above
    that is spread over the others in proportion to their samples (water-filling): the others keep their
    weights, and each cut update gets the largest weight whose share is within the limit. A share is one of
    the whole round's samples, also where each entry of a model has a mean of its own.

    Args:
        claimed: the training samples behind each update of a round.
        max_share: in (0, 1]; 1: no limit.
    """
    counted = sorted((samples for samples in claimed.values() if samples > 0), reverse=True)
    if not counted:
        return {}
    limit = max(Fraction(str(max_share)), Fraction(2, len(counted)))  # exact: all machines cut alike
    if limit >= 1:
        return {}
    rest = sum(counted)
    for num_cut, samples in enumerate(counted):
        most = limit * rest / (1 - num_cut * limit)  # with the first `num_cut` at the limit
        if samples <= most:
            break
        rest -= samples
    return {device: int(most) for device, samples in claimed.items() if samples > most}
