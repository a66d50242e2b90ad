"""How far a peer's words may go: what stands in a message or a payload has one of these types.

They are upper bounds of what makes sense, so that no claim overflows a column, a sum or a quotient. A closer
range may stand beside a field. Bounds also refuse NaN, see msgspec.
"""

from typing import Annotated

from msgspec import Meta

MAX_NUMBER = 2**31 - 1
LARGEST_LOSS = 1e30
LARGEST_AMOUNT = 1e15
MOST_CLASSES = 100_000
MOST_IDS = 2**24  # token ids are stored as float32, which holds every whole number up to here
MAX_WORDS = 500  # characters of a reason that we write; "..." may follow

Number = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]  # of a round, an attempt, an epoch; a count of things
NumSamples = Annotated[int, Meta(ge=0, le=2**40)]  # a weight in averages: never negative
NumBytes = Annotated[int, Meta(ge=0, le=2**60)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Bits64 = Annotated[int, Meta(ge=0)]  # of a payload: MessagePack has none above 2**64 - 1
NonNegative = Annotated[float, Meta(ge=0, le=LARGEST_AMOUNT)]
Positive = Annotated[float, Meta(gt=0, le=LARGEST_AMOUNT)]
Amount = NonNegative  # seconds, bits a second, samples a second, operations
Finite = Annotated[float, Meta(ge=-1e30, le=1e30)]
Loss = Annotated[float, Meta(ge=0, le=LARGEST_LOSS)]
Share = Annotated[float, Meta(ge=0, le=1)]
Ratio = Annotated[float, Meta(gt=0, le=1)]
Watts = Annotated[float, Meta(ge=0, le=10_000)]  # of a whole board
LocalWork = Annotated[float, Meta(gt=0, le=4)]
Uplink = Annotated[int, Meta(ge=0, le=8)]  # which of a run's encodings of updates, see `Enrolment.uplinks`
"""How much of the run's local training, in its epochs; above 1 more than these."""

# `\Z`, not `$`: that also matches before a line break at the end
FleetName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]  # a device's too
RunId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,96}\Z")]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]  # a transfer's id too
ModelHash = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
Words = Annotated[str, Meta(max_length=1000)]  # for people
Label = Annotated[str, Meta(max_length=300)]  # a name in a model
Nonce = Annotated[str, Meta(max_length=100)]
