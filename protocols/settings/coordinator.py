"""What the coordinator heeds of run.toml: how many rounds, who takes part, and when a round closes.

Of all this a device is told `deadline_s` alone, by which it chooses its ratio.
"""

from typing import Annotated, Literal

from msgspec import Meta

from fleetune.protocols.bounds import MAX_NUMBER, FleetName, Int64, NonNegative, Positive
from fleetune.protocols.settings.section import Count, Settings

Factor = Annotated[float, Meta(ge=1, le=1000)]


class RunSection(Settings, frozen=True):
    """[run]

    Attributes:
        name: also the fleet's name and the folder in `runs/`.
        seed: of every draw of the run.
        fleet: whose devices train; None: `name` is the fleet's too.
        rounds: at most this many; or "open": the run goes on until a number of rounds is said here instead
            (docs/open-runs.md).
        final_evaluation: after the last round every device does one more round's work on a copy, so that
            accuracy before and after local training is known for all of them.
    """

    name: FleetName
    seed: Int64 = 0
    rounds: Count | Literal["open"] = 10
    final_evaluation: bool = True
    fleet: FleetName | None = None

    @property
    def is_open(self) -> bool:
        """Whether it goes on until its settings say otherwise."""
        return self.rounds == "open"

    @property
    def last_round(self) -> int | None:
        """The number of the last round; None: there is none."""
        return None if self.rounds == "open" else self.rounds


class RoundSection(Settings, frozen=True):
    """[round]

    Attributes:
        participants: devices a round; None: all that are there.
        over_selection: ask this many times as many; the round closes when `participants` replied.
        deadline_s: a round closes at the latest after this.
        deadline: `fixed`, every round's is `deadline_s`; or `predicted`: what those that are asked expect of
            the round says when enough of them should have replied, and it closes at the latest after
            `deadline_slack` times that, but never later than `deadline_s` nor sooner than a second.
        deadline_slack: see `deadline`.
        prefer: `any` device that is there is drawn alike; or `able`: those that expect a round longer than
            `deadline_s`, say that their link is metered, or run on a battery below `min_battery` are asked
            only when too few others are there for `participants` (without it for `quorum`); or `oort`: by
            what a device's data still have to teach, and by how fast it is; or `pyramid`: likewise, by how
            much its last update changed what it was sent instead of by the loss that it tells; or `tiers`:
            devices that take alike long share a round, drawn by what they have to teach (docs/ratios.md).
        max_wait: with `prefer = "oort"`, `"pyramid"` and `"tiers"`: rounds that a device which is there waits
            for its turn at most; None: three times as many as it takes to ask everybody once.
        min_battery: charge, 0..1, see `prefer`.
        quorum: fewer updates at the deadline: the round is tried again, nothing is aggregated.
        start_with: devices that must be there before round 1 opens; None: `participants` devices (2 where
            that is not set), or those that are there 60 s after the first one came. A simulation whose
            devices are always there waits for all that take part.
        mode: `synchronous`; or semi-asynchronous, where an aggregation counts as a round and `participants`
            is how many devices work at a time: `window` aggregates what arrived every `window_s`, `buffer`
            as soon as `buffer` updates are in.
        window_s: of a window, at most `deadline_s`.
        buffer: updates an aggregation.
        staleness_power: an update that was planned s aggregations ago weighs 1 / (1 + s) ** staleness_power.
        max_staleness: with a greater s it is refused.
        norm_bound: an update whose largest or RMS value is more than this many times that of the shared model
            and of the other updates is refused, as if its device had declined; 0: none is.
        max_share: the largest share of one update in a round's mean of n updates, but never less than 2/n;
            the rest is spread over the others in proportion to their samples. 1: no limit. None: 0.3, or 1 in
            a run that a release without this key began (docs/security.md).
        max_samples: a device that says it holds more training samples may not take part: they are its weight.
    """

    participants: Count | None = None
    over_selection: Factor = 1.0
    deadline_s: Positive = 600.0
    deadline: Literal["fixed", "predicted"] = "fixed"
    deadline_slack: Factor = 1.5
    prefer: Literal["any", "able", "oort", "pyramid", "tiers"] = "any"
    max_wait: Count | None = None
    min_battery: Annotated[float, Meta(ge=0, le=1)] = 0.2
    quorum: Count = 1
    start_with: Count | None = None
    mode: Literal["synchronous", "window", "buffer"] = "synchronous"
    window_s: Positive | None = None
    buffer: Count | None = None
    staleness_power: NonNegative = 0.5
    max_staleness: Annotated[int, Meta(ge=0, le=MAX_NUMBER)] = 20
    norm_bound: NonNegative = 100.0
    max_samples: Count = 10_000_000
    max_share: Annotated[float, Meta(gt=0, le=1)] | None = None

    @property
    def by_utility(self) -> bool:
        """Whether participants are drawn by what asking them is worth."""
        return self.prefer in ("oort", "pyramid", "tiers")

    def __post_init__(self) -> None:
        if self.max_wait is not None and not self.by_utility:
            raise ValueError('max_wait goes with prefer = "oort", "pyramid" and "tiers"')
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
        if self.mode != "synchronous" and self.deadline != "fixed":
            raise ValueError(f'deadline = "{self.deadline}" is for mode = "synchronous", not "{self.mode}"')
