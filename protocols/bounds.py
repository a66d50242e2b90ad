"""Types with bounds for every field of a message or payload.

They are upper bounds of sensible values, so that no peer's value overflows a column, a sum or a quotient. A
field may have a narrower range. Bounds also reject NaN (msgspec).
"""

from typing import Annotated

from msgspec import Meta

MAX_NUMBER = 2**31 - 1
LARGEST_LOSS = 1e30
LARGEST_AMOUNT = 1e15
MOST_CLASSES = 100_000
MOST_IDS = 2**24  # token ids are stored as float32, which is exact for whole numbers up to here
MAX_WORDS = 500  # characters of a reason; "..." may follow

Number = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]  # a round, an attempt, an epoch, a count
NumSamples = Annotated[int, Meta(ge=0, le=2**40)]  # a weight in averages, never negative
NumBytes = Annotated[int, Meta(ge=0, le=2**60)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Bits64 = Annotated[int, Meta(ge=0)]  # bytes of a payload; MessagePack has no integers above 2**64 - 1
NonNegative = Annotated[float, Meta(ge=0, le=LARGEST_AMOUNT)]
Positive = Annotated[float, Meta(gt=0, le=LARGEST_AMOUNT)]
Amount = NonNegative  # seconds, bits a second, samples a second, operations
Finite = Annotated[float, Meta(ge=-1e30, le=1e30)]
Loss = Annotated[float, Meta(ge=0, le=LARGEST_LOSS)]
Share = Annotated[float, Meta(ge=0, le=1)]
Ratio = Annotated[float, Meta(gt=0, le=1)]
Watts = Annotated[float, Meta(ge=0, le=10_000)]  # watts of a whole board
LocalWork = Annotated[float, Meta(gt=0, le=4)]
Uplink = Annotated[int, Meta(ge=0, le=8)]  # index of a run's uplink encodings, see `Enrolment.uplinks`
"""Local training as a multiple of the run's epochs."""

# `\Z`, because `$` also matches before a final line break
FleetName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]  # also a device's
RunId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,96}\Z")]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]  # also a transfer's id
ModelHash = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
Words = Annotated[str, Meta(max_length=1000)]  # text for people
Label = Annotated[str, Meta(max_length=300)]  # a name in a model
Pem = Annotated[str, Meta(max_length=8192)]  # certificates, or a signing request
Nonce = Annotated[str, Meta(max_length=100)]
