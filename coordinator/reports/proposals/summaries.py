"""What ratios and encodings that the coordinator proposed took and brought, as summary.json has it."""

from msgspec import Struct


class RatioSummary(Struct, frozen=True, kw_only=True):
    """What working at a ratio took and brought; None: not known.

    Attributes:
        ratio: which.
        replies: made at it.
        seconds, up, joules: medians of these, of whole rounds, payload bytes and energy.
        local_work: mean share of the local training that was done.
        worth: of working at it, over the mean of all ratios seen, in units of the score.
        deviation: standard deviation of that.
    """

    ratio: float
    replies: int
    seconds: float | None = None
    up: float | None = None
    joules: float | None = None
    local_work: float = 1.0
    worth: float | None = None
    deviation: float | None = None


class EncodingSummary(Struct, frozen=True):
    """What was sent by an encoding.

    Attributes:
        encoding: which, with the settings that run.toml gives it.
        replies: whose updates were asked for by it.
        up: median of their payload bytes.
    """

    encoding: str
    replies: int
    up: float
