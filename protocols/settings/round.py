"""Section [round] of run.toml: client selection, and when a round closes.

Of these keys a device receives only `deadline_s`, which it needs to choose its ratio.
"""

from typing import Annotated, Literal

from msgspec import Meta

from fleetune.protocols.bounds import MAX_NUMBER, NonNegative, Positive
from fleetune.protocols.settings.section import Count, Settings

Factor = Annotated[float, Meta(ge=1, le=1000)]


class RoundSection(Settings, frozen=True):
    """[round]

    Attributes:
        participants: number of devices that train in a round. If left out, all connected devices take part.
        over_selection: factor on the number of selected devices. The round closes once `participants` of them
            have replied.
        deadline_s: longest duration of a round.
        deadline_slack: with `objective.minimise = "time"`, a round may take this many times the duration that
            its devices predict, at least 1 s and at most `deadline_s`.
        prefer: rule of the client selection. `any`: a uniform random draw. `oort`: utility-based selection by
            training loss and speed. `tiers`: devices of similar speed share a round, drawn by utility within
            their tier (docs/ratios.md). With `oort` and `tiers`, no connected device waits longer than three
            times the number of rounds in which every device could take part once.
        quorum: smallest number of updates that a round needs. With fewer at the deadline nothing is
            aggregated and the round is tried again.
        start_with: number of devices that must be connected before round 1 starts. If left out, round 1 waits
            for `participants` devices (2 if that is left out too) or for 60 s after the first device
            connected. A simulation whose devices are always available waits for all of them.
        mode: `synchronous`, or one of two semi-asynchronous modes. There an aggregation counts as a round,
            and `participants` is the number of devices that work at the same time. `window` aggregates every
            `window_s` what has arrived; `buffer` aggregates as soon as `buffer` updates have arrived.
        window_s: length of a window, at most `deadline_s`.
        buffer: number of updates in an aggregation.
        staleness_power: exponent of the staleness discount. An update planned s aggregations ago has the
            weight 1 / (1 + s) ** staleness_power.
        max_staleness: an update with a greater staleness s is rejected.
        norm_bound: update-norm bound. An update is rejected if its largest or RMS value exceeds this multiple
            of the shared model's value and of the other updates' value. The device then counts as having
            declined. 0: no bound.
        max_share: largest weight of one update in the mean of a round with n updates, but at least 2/n. The
            excess goes to the other updates in proportion to their samples. 1: no limit (docs/security.md).
        robust: rule that combines updates. `none`: the mean weighted by samples. `clip`: the mean, with each
            step clipped to the median RMS of the last round's steps. `median`: the median of each entry.
            `trimmed-mean`: the mean of each entry without the largest and smallest values. `krum`: the mean
            of the updates that lie nearest to others. Not every method can have every rule
            (docs/robust.md).
        max_hostile: largest share of a round's updates that may be hostile. `trimmed-mean` cuts that share at
            both ends, and `krum` leaves that share out.
        quarantine: number of outlying rounds in a row after which a device's updates no longer count, until
            as many rounds in a row are not outlying. If left out, there is no quarantine. An honest device
            with unusual data can be outlying too (docs/robust.md).
        max_samples: a device that reports more training samples is not selected, because the number of
            samples is its weight.
    """

    participants: Count | None = None
    over_selection: Factor = 1.0
    deadline_s: Positive = 600.0
    deadline_slack: Factor = 1.5
    prefer: Literal["any", "oort", "tiers"] = "any"
    quorum: Count = 1
    start_with: Count | None = None
    mode: Literal["synchronous", "window", "buffer"] = "synchronous"
    window_s: Positive | None = None
    buffer: Count | None = None
    staleness_power: NonNegative = 0.5
    max_staleness: Annotated[int, Meta(ge=0, le=MAX_NUMBER)] = 20
    norm_bound: NonNegative = 100.0
    robust: Literal["clip", "median", "trimmed-mean", "krum", "none"] = "none"
    max_hostile: Annotated[float, Meta(ge=0, lt=0.5)] = 0.2
    quarantine: Count | None = None
    max_samples: Count = 10_000_000
    max_share: Annotated[float, Meta(gt=0, le=1)] = 0.3

    @property
    def by_utility(self) -> bool:
        """True if the client selection ranks devices by utility."""
        return self.prefer != "any"

    def __post_init__(self) -> None:
        at_most = None if self.mode != "synchronous" else self.participants
        if at_most is not None and self.quorum > at_most:
            raise ValueError(f"quorum = {self.quorum} is more than participants = {at_most}")
        for key, mode in (("window_s", "window"), ("buffer", "buffer")):
            value = getattr(self, key)
            if (self.mode == mode) != (value is not None):
                verb = "is missing: it belongs to" if value is None else "only goes with"
                raise ValueError(f'{key} {verb} mode = "{mode}"')
        if self.window_s is not None and self.window_s > self.deadline_s:
            raise ValueError(f"window_s = {self.window_s:g} is longer than deadline_s = {self.deadline_s:g}")
        if self.mode != "synchronous" and self.over_selection != 1:
            raise ValueError(f'over_selection is for mode = "synchronous"; with "{self.mode}" leave it out')
