"""A decoder of docs/wire.md's encodings in plain Python, written from that page: no numpy, no product.

Arrays are lists; a base is a list of numbers that float32 holds, `tensors` the number of each entry's tensor.
"""

import hashlib
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import zstandard
from tests.wire import lowrank_decoder

CHUNK, BLOCK = 65536, 64
LARGEST = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]

ReferenceModel = Sequence[float] | None


@dataclass
class Stream:
    """The bytes that are still to be read."""

    data: bytes
    at: int = 0

    def take(self, length: int) -> bytes:
        if self.at + length > len(self.data):
            raise ValueError("cut short")
        self.at += length
        return self.data[self.at - length : self.at]

    def unpack(self, length: int) -> bytes:
        stored = self.take(int.from_bytes(self.take(4), "little"))
        if len(stored) == length:
            return stored
        if zstandard.get_frame_parameters(stored).content_size != length:
            raise ValueError("a stream of another length")
        return zstandard.ZstdDecompressor().decompress(stored)


def decode(name: str, data: bytes, count: int, base: ReferenceModel, tensors: Sequence[int]) -> list[float]:
    """The values that `name` wrote."""
    if name == "sketch":
        return sketch(data, count, base, tensors)
    if name == "peaks":
        return peaks(data, count, base)
    stream, values = Stream(data), []
    if stream.take(1) == b"\0":
        base = None
    elif base is None:
        raise ValueError("a base is needed")
    for start in range(0, count, CHUNK):
        here = slice(start, min(start + CHUNK, count))
        of_chunk = [0.0] * (here.stop - start) if base is None else list(base[here])
        values += READERS[name](stream, of_chunk, list(tensors[here]))
    if stream.at != len(data):
        raise ValueError("something follows")
    return values


def float32(number: float) -> float:
    """The nearest float32; infinite where that is beyond the largest."""
    try:
        return struct.unpack("<f", struct.pack("<f", number))[0]
    except OverflowError:
        return math.copysign(math.inf, number)


def moved(base: float, difference: float) -> float:
    """What a difference comes to, held within float32's finite numbers."""
    return min(max(float32(base + float32(difference)), -LARGEST), LARGEST)


def lossless(stream: Stream, base: list[float], _: list[int]) -> list[float]:
    count = len(base)
    packed = stream.unpack(math.ceil(count / 4))
    classes = [packed[i // 4] >> 2 * (i % 4) & 3 for i in range(count)]
    ones, twos, threes = (classes.count(one) for one in (1, 2, 3))
    leading = [stream.unpack(length) for length in (ones, twos, threes, threes)]
    low, second = stream.take(twos + threes), stream.take(threes)
    numbers = {
        1: list(leading[0]),
        2: [low[i] | leading[1][i] << 8 for i in range(twos)],
        3: [
            low[twos + i] | second[i] << 8 | leading[2][i] << 16 | leading[3][i] << 24 for i in range(threes)
        ],
    }
    following = {kind: iter(each) for kind, each in numbers.items()}
    zigzag = [next(following[kind]) if kind else 0 for kind in classes]
    return [from_order(to_order(b) + ((z >> 1) ^ -(z & 1))) for b, z in zip(base, zigzag, strict=True)]


def to_order(number: float) -> int:
    """-2147483648 to 2147483647."""
    (bits,) = struct.unpack("<i", struct.pack("<f", number))
    return bits if bits >= 0 else bits ^ 0x7FFFFFFF


def from_order(order: int) -> float:
    order = (order + 2**31) % 2**32 - 2**31
    return struct.unpack("<f", struct.pack("<i", order if order >= 0 else order ^ 0x7FFFFFFF))[0]


def int8(stream: Stream, base: list[float], tensors: list[int]) -> list[float]:
    scales = scale_of_each(stream, len(base), tensors)
    integers = struct.unpack(f"<{len(base)}b", stream.unpack(len(base)))
    return added(base, integers, scales)


def int4(stream: Stream, base: list[float], tensors: list[int]) -> list[float]:
    scales = scale_of_each(stream, len(base), tensors)
    packed = stream.unpack(math.ceil(len(base) / 2))
    nibbles = [packed[i // 2] >> 4 * (i % 2) & 15 for i in range(len(base))]
    return added(base, [one - 16 if one > 7 else one for one in nibbles], scales)


def scale_of_each(stream: Stream, count: int, tensors: list[int]) -> list[float]:
    block_of, within, last = [], BLOCK, None
    for i in range(count):
        tensor = tensors[i] if tensors else 0
        if within == BLOCK or tensor != last:
            within, last = 0, tensor
            block_of.append((block_of[-1] if block_of else -1) + 1)
        else:
            block_of.append(block_of[-1])
        within += 1
    packed = stream.unpack(2 * (block_of[-1] + 1))
    scales = [
        struct.unpack("<f", b"\0\0" + packed[i : i + 2])[0] for i in range(0, len(packed), 2)
    ]  # the upper halves of float32 numbers
    return [scales[block] for block in block_of]


def added(base: list[float], integers: Sequence[int], scales: list[float]) -> list[float]:
    return [moved(b, integer * scale) for b, integer, scale in zip(base, integers, scales, strict=True)]


READERS: dict[str, Callable[[Stream, list[float], list[int]], list[float]]] = {
    "lossless": lossless,
    "int8": int8,
    "int4": int4,
}


def sketch(data: bytes, count: int, base: ReferenceModel, tensors: Sequence[int]) -> list[float]:
    flags, rest = data[0], data[1:]
    if flags == 0:
        return list(struct.unpack(f"<{count}f", rest))
    if base is None or flags not in (1, 3, 5, 7):
        raise ValueError("a base is needed, and a form that is known")
    told = [0.0] * count
    if flags & 2:
        log = rest[0]
        told = list(told_by_sums(rest[: 7 + 2**log // 8], count))
        rest = rest[7 + 2**log // 8 :]
    if flags & 4:
        base = lowrank_decoder.decode(rest, count, base, tensors, (), None)
    elif rest:
        raise ValueError("something follows")
    return [float32(one + change) for one, change in zip(base, told, strict=True)]


def peaks(data: bytes, count: int, base: ReferenceModel) -> list[float]:
    first, log = data[0], data[0] - 2
    if first == 0:
        return list(struct.unpack(f"<{count}f", data[1:]))
    if base is None or first > 12:
        raise ValueError("a base is needed, and a form that is known")
    if first == 1:
        return list(base)
    (seed,), (scale,) = struct.unpack("<H", data[1:3]), struct.unpack("<f", b"\0\0" + data[3:5])
    bits = "".join(f"{byte:08b}" for byte in data[5:])
    groups = len(bits) // (log + 1)
    signs = [0] * 2 ** (groups * 2**log - 1).bit_length()
    for group in range(groups):
        word = bits[group * (log + 1) : (group + 1) * (log + 1)]
        signs[group * 2**log + int("0" + word[:-1], 2)] = 1 if word[-1] == "1" else -1
    sums = [float32(one * scale) for one in rotated(signs)]
    told = (sums[at % len(sums)] * sign for at, sign in enumerate(random_signs(seed, count)))
    return [float32(one + change) for one, change in zip(base, told, strict=True)]


def told_by_sums(data: bytes, count: int) -> Iterator[float]:
    log, seed, scale = struct.unpack_from("<BHf", data)
    signs = [1 if byte >> 7 - bit & 1 else -1 for byte in data[7:] for bit in range(8)]
    if len(signs) != 2**log or scale <= 0:
        raise ValueError("no sums")
    sums = [float32(one * scale) for one in rotated(signs)]
    return (sums[at % len(sums)] * sign for at, sign in enumerate(random_signs(seed, count)))


def rotated(signs: list[int]) -> list[int]:
    """Number j is the sum of all, of number i negative where i and j have an odd number of bits in common."""
    if len(signs) == 1:
        return signs
    half = len(signs) // 2
    first, second = rotated(signs[:half]), rotated(signs[half:])
    pairs = list(zip(first, second, strict=True))
    return [one + other for one, other in pairs] + [one - other for one, other in pairs]


def random_signs(seed: int, count: int) -> list[int]:
    path = b"".join(len(part).to_bytes(4, "little") + part for part in (b"sketch", str(seed).encode()))
    key, found = int.from_bytes(hashlib.sha256(path).digest()[:8], "little"), list[int]()
    for draw in range(-(-count // 64)):
        z = key + (draw + 1) * 0x9E3779B97F4A7C15 & 2**64 - 1
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & 2**64 - 1
        z = (z ^ z >> 27) * 0x94D049BB133111EB & 2**64 - 1
        z ^= z >> 31
        found += [1 if z >> bit & 1 else -1 for bit in range(64)]
    return found[:count]
