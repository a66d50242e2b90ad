"""Describes what an agent can read, beyond the formats that every agent must read.

Every agent reads values in the encoding `raw`, masks as bitmaps, and messages in JSON. All other formats are
features. `SETS` numbers the sets of features. An agent reports the number of a set and its differences from
that set, so an agent that reads everything reports only a number. A later version of Fleetune adds a set to
`SETS`, and never changes an earlier one.
"""

from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import astuple, fields

from fleetune.protocols.bounds import Number

MOST_FEATURES = 100  # of one kind, in one list
MOST_NAMED = 5  # missing features of one kind that a message names; it counts the others

Feature = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,40}\Z")]
FeatureNames = Annotated[tuple[Feature, ...], Meta(max_length=MOST_FEATURES)]


class Features(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Names of features, by kind.

    Attributes:
        encodings: encodings of values (`protocols.update.encodings`), which the agent reads and writes.
        masks: forms of masks. "coded": entropy-coded masks (`protocols.update.masks`).
        messages: "compact": messages as arrays (`protocols.wire.compact_message`). "renewal": the messages
            that renew a certificate.
        operators: ONNX operators in the graphs of a bundle (`protocols.bundle.graph`).
        updates: forms of updates. "private": clipped, and with noise if [privacy] asks for it.
    """

    encodings: FeatureNames = ()
    masks: FeatureNames = ()
    messages: FeatureNames = ()
    operators: FeatureNames = ()
    updates: FeatureNames = ()

    def without(self, other: "Features") -> "Features":
        """Return the features of this object that `other` lacks, in their order."""
        return Features(
            *(tuple(one for one in mine if one not in theirs) for mine, theirs in self._pairs(other))
        )

    def with_all(self, other: "Features") -> "Features":
        """Return the features of both objects."""
        return Features(*(tuple(dict.fromkeys(mine + theirs)) for mine, theirs in self._pairs(other)))

    def _pairs(self, other: "Features") -> "zip[tuple[tuple[str, ...], tuple[str, ...]]]":
        return zip(astuple(self), astuple(other), strict=True)

    def __bool__(self) -> bool:
        return any(astuple(self))

    def __str__(self) -> str:
        """Return the features in one line, such as `encoding sketch, operators Conv and Gemm`."""
        return ", ".join(
            _listed(kind.name.removesuffix("s"), names)
            for kind, names in zip(fields(self), astuple(self), strict=True)
            if names
        )


def _listed(kind: str, names: tuple[str, ...]) -> str:
    if len(names) == 1:
        return f"{kind} {names[0]}"
    named, more = names[:MOST_NAMED], len(names) - MOST_NAMED
    last = f"{more} more" if more > 0 else named[-1]
    return f"{kind}s {', '.join(named if more > 0 else named[:-1])} and {last}"


_READS = Features(
    encodings=("lossless", "int8", "int4", "sparse", "sketch", "peaks", "lowrank"),
    masks=("coded",),
    messages=("compact",),
    operators=tuple(
        """
        Abs Add And ArgMax Cast Clip Concat ConstantOfShape Conv ConvTranspose Cos CumSum DepthToSpace Div
        Equal Erf Exp Expand Gather GatherElements Gemm Greater GreaterOrEqual Identity LeakyRelu Less
        LessOrEqual Log LogSoftmax MatMul Max MaxPool Min Mul Neg Not OneHot Or Pad Pow Reciprocal ReduceMax
        ReduceMean ReduceMin ReduceSum Relu Reshape ScatterElements ScatterND Shape Sigmoid Sign Sin Slice
        Softmax Softplus SpaceToDepth Split Sqrt Sub Tanh Tile Transpose Where
        """.split()  # noqa: SIM905 - a list of sixty strings reads worse
    ),
)
_READS_2 = _READS.with_all(Features(operators=("Floor", "TopK")))
_READS_3 = _READS_2.with_all(Features(operators=("Scan",)))
_READS_4 = _READS_3.with_all(Features(messages=("renewal",)))
SETS = (
    *(Features(), _READS, _READS_2, _READS_3, _READS_4),
    _READS_4.with_all(Features(updates=("private",))),
)


class Capabilities(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The formats that an agent reads: a numbered set of features, and the differences from it.

    Attributes:
        set: index in `SETS`. A number above the last index means the last set, because later sets contain all
            earlier features.
        lacks: features of the set that the agent does not read.
        also: features that the agent reads, but that are not in the set.
    """

    set: Number = 0
    lacks: Features = Features()
    also: Features = Features()

    @property
    def features(self) -> Features:
        """All features that the agent reads."""
        return SETS[min(self.set, len(SETS) - 1)].without(self.lacks).with_all(self.also)


ONLY_THE_MINIMUM = Capabilities()
EVERYTHING = Capabilities(len(SETS) - 1)
