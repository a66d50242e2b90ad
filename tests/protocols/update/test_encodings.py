"""What every encoding of values keeps to; and that a new one is a class and a line, which travels at once."""

import tracemalloc
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.conftest import tiny_spec
from tests.helpers.errors import raises
from tests.protocols.update.test_codec import forged

from fleetune.protocols.errors import (
    PacketCorrupt,
    PacketError,
    PacketNotFinite,
    PacketTooLarge,
    SettingError,
)
from fleetune.protocols.method.averaging import SharedModel, Task
from fleetune.protocols.method.choice import Choice, Cost, with_encodings
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key
from fleetune.protocols.update import codec, encodings
from fleetune.protocols.update.encodings.encoding import Encoded, Encoding, EncodingCost, Known
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.patch_values import PatchWriter
from fleetune.protocols.update.reference_model import ReferenceModel
from fleetune.protocols.update.selection import Entries, Everything, Layers, Selection

SPEC = tiny_spec()
LIMIT = codec.payload_limit(SPEC)
KEY = Key(7)


class Half(Encoding):
    """Made up here: the difference to the base as float16, what that loses handed back."""

    name = "half"
    cost = EncodingCost(bytes_per_value=2, encode_ns=1, decode_ns=1)
    lossless = False

    def encode(self, values, known, residual, key):
        wanted = values if residual is None else values + residual
        data = (wanted if known.reference is None else wanted - known.reference).astype("<f2").tobytes()
        return Encoded(data, wanted - self.decode(data, values.size, known))

    def decode(self, data, count, known):
        if len(data) != 2 * count:
            raise PacketCorrupt(f"{count} values with {len(data)} bytes")
        found = np.frombuffer(data, "<f2").astype(np.float32)
        if known.reference is not None and np.isfinite(found).all():
            found += known.reference
        return found


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(encodings.REGISTRY, "half", f"{__name__}:Half")


numbers = hnp.arrays(np.float32, st.integers(0, 40), elements=st.floats(-100, 100, width=32))


def handing_back(name):
    """The encoding, where all that it leaves out is handed back."""
    if encodings.find(name).on_average:
        pytest.skip("what it leaves out is told on average, see below")
    return encodings.find(name)


every_encoding = pytest.mark.parametrize("name", [*encodings.REGISTRY, "half"])
fuzzed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@every_encoding
@pytest.mark.parametrize("based", [False, True])
@given(values=numbers, data=st.data())
@fuzzed
def test_what_is_read_and_what_is_left_out_are_what_was_given(name, based, values, data):
    encoding = handing_back(name)
    same_length = hnp.arrays(np.float32, values.size, elements=st.floats(-1, 1, width=32))
    reference, residual = data.draw(same_length) if based else None, data.draw(st.none() | same_length)
    known = Known(reference, np.arange(values.size, dtype=np.int16) // 7)
    given_arrays = [one for one in (values, reference, residual) if one is not None]
    before = [one.tobytes() for one in given_arrays]

    encoded = encoding.encode(values, known, residual, KEY)
    back = encoding.decode(encoded.data, values.size, known)

    assert back.dtype == np.float32
    assert back.shape == values.shape
    wanted = values if residual is None else values + residual
    left = np.zeros_like(values) if encoded.residual is None else encoded.residual
    np.testing.assert_allclose(back + left, wanted, rtol=1e-5, atol=1e-4)
    if encoding.lossless:
        assert back.tobytes() == wanted.tobytes()
        assert encoded.residual is None
    assert encoding.encode(values, known, residual, KEY).data == encoded.data
    assert [one.tobytes() for one in given_arrays] == before


@every_encoding
def test_what_is_not_left_for_later_arrives_on_average(name):
    encoding, draw = encodings.find(name), KEY.generator()
    reference = draw.normal(0, 1, 200).astype(np.float32)
    values, known = reference + draw.standard_t(3, 200).astype(np.float32), Known(reference)
    if encoding.encode(values, known, None, KEY).residual is not None:
        return  # it arrives later
    written = (encoding.encode(values, known, None, KEY.child(number)).data for number in range(300))
    mean = np.mean([encoding.decode(data, 200, known) for data in written], axis=0)
    assert np.dot(mean - reference, values - reference) / np.square(
        values - reference
    ).sum() == pytest.approx(1, abs=0.15)


@every_encoding
@given(noise=st.binary(max_size=200), count=st.integers(0, 50))
@fuzzed
def test_any_bytes_give_so_many_values_or_are_refused(name, noise, count):
    try:
        values = encodings.find(name).decode(noise, count, Known(np.ones(count, np.float32)))
    except PacketError:
        return
    assert values.shape == (count,)
    assert values.dtype == np.float32


@every_encoding
@pytest.mark.parametrize("based", [False, True])
@given(values=numbers, data=st.data())
@fuzzed
def test_damaged_bytes_give_so_many_values_or_are_refused(name, based, values, data):
    encoding, count = encodings.find(name), values.size
    known = Known(np.ones(count, np.float32) if based else None, np.arange(count, dtype=np.int16) // 7)
    damaged = bytearray(encoding.encode(values, known, None, KEY).data)
    for _ in range(data.draw(st.integers(1, 4))):
        if damaged:
            damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    cut = bytes(damaged[: data.draw(st.integers(0, len(damaged)))]) if data.draw(st.booleans()) else None
    try:
        back = encoding.decode(bytes(damaged) if cut is None else cut, count, known)
    except PacketError:
        return
    assert (back.shape, back.dtype) == ((count,), np.float32)


@every_encoding
def test_few_bytes_never_take_more_than_the_values_and_some_scratch_space(name, differences):
    known, values = differences
    encoding, most = encodings.find(name), 1_000_000
    data = encoding.encode(values, known, None, KEY).data
    many = Known(np.ones(most, np.float32))
    for hostile in (b"", b"\0" * 1000, b"\1" * 1000, b"\xff" * 1000, data[:1000], data):
        tracemalloc.start()
        with suppress(PacketError):
            encoding.decode(hostile, most, many)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak <= 4 * most + 3_000_000


EXTREMES = np.array(
    [0, -0.0, 1e-45, -1e-45, 1.1754942e-38, 1e-38, 3.4028235e38, -3.4028235e38, 1, -1, 0.1, 65504, 65520],
    np.float32,
)


@every_encoding
@pytest.mark.parametrize(
    "reference", [None, EXTREMES, -EXTREMES, np.roll(EXTREMES, 5), np.ones(13, np.float32)]
)
def test_finite_values_stay_finite_whatever_they_are(name, reference):
    if name == "half":
        pytest.skip("made up here, and less than an encoding of a release")
    encoding, known = handing_back(name), Known(reference)
    encoded = encoding.encode(EXTREMES, known, None, KEY)
    back = encoding.decode(encoded.data, EXTREMES.size, known)
    assert np.isfinite(back).all()
    if encoding.lossless:
        assert back.tobytes() == EXTREMES.tobytes()
    else:
        assert encoded.residual is not None
        assert np.isfinite(encoded.residual).all()


@every_encoding
def test_many_chunks_and_tensors_come_back_in_their_places(name, differences):
    known, values = differences
    times = 20  # more than two chunks of the encodings that have them
    values, reference = np.tile(values, times), np.tile(known.reference, times)
    tensors = np.arange(values.size, dtype=np.int64) // 5000
    known = Known(reference, tensors.astype(np.int16))
    encoding = handing_back(name)
    encoded = encoding.encode(values, known, None, KEY)
    back = encoding.decode(encoded.data, values.size, known)
    left = np.zeros_like(values) if encoded.residual is None else encoded.residual
    np.testing.assert_allclose(back + left, values, atol=1e-6)
    if name != "half":
        share = 1 if name == "sparse" else 0.5  # that one leaves most entries for later
        assert np.linalg.norm(left) < share * np.linalg.norm(values - reference)


@every_encoding
def test_differences_are_never_read_without_their_base(name, differences):
    known, values = differences
    encoding = encodings.find(name)
    data = encoding.encode(values, known, None, KEY).data
    if data == encoding.encode(values, Known(), None, KEY).data or name == "half":
        pytest.skip("uses no base, or is made up here")
    with pytest.raises(PacketCorrupt, match="reference"):
        encoding.decode(data, values.size, Known())


@pytest.fixture(scope="session")
def differences():
    """Of a LeNet-5 in FedAvg's sixth round: see tests/data/README.md."""
    with np.load(Path(__file__).parents[2] / "data" / "lenet5-differences.npz") as kept:
        return Known(kept["base"], kept["tensors"]), kept["values"]


# Priced by whole tensors; the first sixth of their rows takes, and loses, twice as much.
OF_THE_PRICE = {"lowrank": 0.5}


@every_encoding
def test_its_size_is_about_what_a_payload_takes(name, differences):
    known, values = differences
    if name == "half":
        pytest.skip("made up here: its cost is not measured")
    encoding = encodings.find(name)
    data = encoding.encode(values, known, None, KEY).data
    taken = len(zstandard.ZstdCompressor(level=codec.ZSTD_LEVEL).compress(data))
    share = (
        0.5 if name == "lowrank" else 1
    )  # it is priced by whole tensors: here a sixth of the rows bear it all
    assert encoding.size(values.size) == pytest.approx(share * taken, rel=0.15)
    assert codec.estimate_bytes(values.size, name) == 150 + encoding.size(values.size)
    assert encoding.size(0) == 0
    assert min(encoding.cost.encode_ns, encoding.cost.decode_ns) > 0


@every_encoding
@pytest.mark.parametrize("selection", [Everything(), Layers(("a",)), Layers(())])
def test_it_carries_a_patch_to_a_side_with_the_same_base(name, selection, weights):
    reference = ReferenceModel(weights + np.float32(0.5), np.ones(SPEC.size, np.bool_))
    patch = Patch.of(weights, selection, SPEC)
    writer = PatchWriter(handing_back(name), SPEC, KEY, reference=reference)
    data = codec.encode(Task(patch), SPEC, writer=writer)
    back = codec.decode(data, Task, SPEC, limit=LIMIT, reference=reference).patch
    assert back.selection == selection
    left = np.zeros(SPEC.size, np.float32) if writer.next_residual is None else writer.next_residual
    np.testing.assert_allclose(back.values + left[selection.mask(SPEC)], patch.values, atol=1e-6)
    assert not left[~selection.mask(SPEC)].any()


@every_encoding
def test_an_entry_that_the_base_lacks_is_never_lost_in_a_small_difference(name, weights):
    held = np.arange(SPEC.size) != 1
    reference = ReferenceModel(np.where(held, weights, np.float32(0)), held)
    patch = Patch.of(weights, Everything(), SPEC)
    writer = PatchWriter(encodings.find(name), SPEC, KEY, reference=reference)
    data = codec.encode(Task(patch), SPEC, writer=writer)
    assert (
        codec.decode(data, Task, SPEC, limit=LIMIT, reference=reference).patch.values.tobytes()
        == patch.values.tobytes()
    )


@every_encoding
def test_prices_follow_the_encodings_of_both_directions(name):
    encoding, raw, size = encodings.find(name), encodings.find("raw"), 1_000_000
    plain = Choice(1.0, Cost(bytes_down=2_000_000, bytes_up=4_000_000))
    (priced,) = with_encodings([plain], [encoding], raw, size)
    share = encoding.size(size) / raw.size(size)
    assert priced.cost.bytes_up == pytest.approx(4_000_000 * share + codec.FRAME_BYTES, rel=0.01, abs=20)
    assert priced.cost.bytes_down == 2_000_000
    masked = Choice(1.0, Cost(bytes_down=2_500_000, bytes_up=4_500_000, mask_bytes_up=500_000))
    (beside,) = with_encodings([masked], [encoding], encoding, size)
    assert beside.cost.bytes_up == priced.cost.bytes_up + 500_000
    assert beside.cost.bytes_down == pytest.approx(2_000_000 * share + 500_000 + codec.FRAME_BYTES, rel=0.01)
    keeps_nothing = encoding.lossless or encoding.on_average or name == "half"
    residuals = 0 if keeps_nothing else 8 * size  # old and new
    assert priced.cost.memory_bytes == residuals
    assert beside.cost.memory_bytes == residuals + (0 if name == "raw" else 4 * size)
    assert with_encodings([plain], [raw], raw, size) == [plain]


@pytest.mark.parametrize(("density", "levels"), [(0.005, 8), (0.02, 1), (0.05, 1), (0.05, 8), (0.2, 4)])
def test_the_price_of_sparse_follows_its_settings(density, levels, differences):
    known, values = differences
    encoding = encodings.chosen({"name": "sparse", "density": density, "levels": levels})
    data = encoding.encode(values, known, None, KEY).data
    assert encoding.size(values.size) == pytest.approx(len(data), rel=0.5)  # a sixth of one small model
    thicker = encodings.chosen({"name": "sparse", "density": 2 * density, "levels": levels})
    finer = encodings.chosen({"name": "sparse", "density": density, "levels": levels + 1})
    for other in (thicker, finer):
        assert other.cost.bytes_per_value > encoding.cost.bytes_per_value
        assert other.cost.relative_error <= encoding.cost.relative_error


@every_encoding
def test_the_error_of_its_price_is_about_that_of_an_update(name, differences):
    if name == "half":
        pytest.skip("made up here: its cost is not measured")
    known, values = differences
    encoding = encodings.find(name)
    back = encoding.decode(encoding.encode(values, known, None, KEY).data, values.size, known)
    found = np.linalg.norm(back - values) / np.linalg.norm(values - known.reference)
    assert encoding.cost.relative_error == pytest.approx(OF_THE_PRICE.get(name, 1) * found, rel=0.35)
    assert (encoding.cost.relative_error == 0) == encoding.lossless


def test_raw_by_name_is_what_is_written_without_a_choice(weights):
    patch = Patch.of(weights, Everything(), SPEC)
    chosen = codec.encode(Task(patch), SPEC, writer=PatchWriter(encodings.find("raw"), SPEC, KEY))
    assert chosen == codec.encode(Task(patch), SPEC)
    assert codec.decode(chosen, Task, SPEC).patch.values.tobytes() == patch.values.tobytes()


def test_the_bytes_of_raw_are_those_of_every_version_before():
    patch = Patch(Layers(("a",)), np.arange(SPEC.layers["a"].stop, dtype=np.float32))
    planes = patch.values.view("u1").reshape(-1, 4).T.tobytes()
    selection = {"type": "Layers", "names": ["a"]}
    body = {"patch": {"selection": selection, "values": ["f4", [patch.values.size], planes]}}
    assert codec.encode(Task(patch), SPEC) == forged(msgspec.msgpack.encode(body))


def test_what_was_left_out_goes_along_the_next_time(weights):
    """Over rounds the sum of what arrived comes to the sum of what was meant, to one round's rounding."""
    selection = Entries(np.arange(SPEC.num_parameters) % 2 == 0)
    mask = selection.mask(SPEC)
    residual, arrived = None, np.zeros(mask.sum(), np.float64)
    values = np.full(SPEC.size, 1 + 2**-12, np.float32)  # float16 has 10 bits behind the point
    for number in range(64):
        writer = PatchWriter(encodings.find("half"), SPEC, KEY.child(number), residual=residual)
        data = codec.encode(Task(Patch.of(values, selection, SPEC)), SPEC, writer=writer)
        residual = writer.next_residual
        arrived += codec.decode(data, Task, SPEC, limit=LIMIT).patch.values
    assert np.abs(arrived - 64 * values[0]).max() <= 2**-10
    assert not residual[~mask].any()


@dataclass(frozen=True)
class TwoPatches:
    groups: dict[str, Patch]
    alone: Patch | None
    table: FlatArray


def test_every_patch_of_a_payload_is_encoded_and_nothing_else(weights):
    groups = {"b": Patch.of(weights, Layers(("b",)), SPEC), "a": Patch.of(weights, Everything(), SPEC)}
    message = TwoPatches(groups, None, weights)
    data = codec.encode(message, SPEC, writer=PatchWriter(encodings.find("half"), SPEC, KEY))
    back = codec.decode(data, TwoPatches, SPEC, limit=LIMIT)
    assert back.table.tobytes() == weights.tobytes()
    for name, patch in groups.items():
        assert np.array_equal(back.groups[name].values, patch.values.astype(np.float16).astype(np.float32))


def packet(selection: Selection, name: str, shape: list[int], data: bytes) -> bytes:
    values = [name, shape, data]
    task = {"patch": {"selection": msgspec.to_builtins(selection), "values": values}}
    return forged(msgspec.msgpack.encode(task))


def test_an_encoding_that_this_side_does_not_know_is_refused_by_name():
    with pytest.raises(PacketCorrupt, match="'zap'"):
        codec.decode(packet(Everything(), "zap", [3], b"123"), Task, SPEC, limit=LIMIT)
    with raises(SettingError, remedy="'half'"):
        encodings.find("hafl")
    with raises(SettingError, "'zap'", remedy=("raw", "half")):
        encodings.find("zap")
    with raises(SettingError, "encoding lowrank: step", "`float`"):
        encodings.chosen({"name": "lowrank", "step": "fine"})


def test_a_peer_can_name_no_module_to_be_loaded():
    with raises(PacketCorrupt, "'this:s'"):
        codec.decode(packet(Everything(), "this:s", [3], b"123"), Task, SPEC, limit=LIMIT)


@pytest.mark.parametrize(
    ("fault", "shape", "data"),
    [
        (PacketCorrupt, [SPEC.num_parameters - 1], b"\0" * 2 * (SPEC.num_parameters - 1)),
        (PacketCorrupt, [SPEC.num_parameters], b"\0" * 3),
        (PacketCorrupt, [1, SPEC.num_parameters], b"\0" * 2 * SPEC.num_parameters),
        (PacketTooLarge, [SPEC.size + 1], b""),
        (PacketTooLarge, [2**39], b""),
        (PacketCorrupt, [-1], b""),
        (PacketNotFinite, [SPEC.num_parameters], b"\x00\x7e" * SPEC.num_parameters),
    ],
    ids=["too few", "cut short", "two axes", "more than the model", "an exabyte", "less than none", "nan"],
)
def test_hostile_sizes_are_refused_before_anything_is_allocated(fault, shape, data, monkeypatch):
    decoded = []
    monkeypatch.setattr(Half, "decode", _watched(Half.decode, decoded))
    with pytest.raises(fault):
        codec.decode(packet(Everything(), "half", shape, data), Task, SPEC, limit=LIMIT)
    assert all(count == SPEC.num_parameters for count in decoded)


def _watched(decode, seen):
    def watching(self, data, count, reference):
        seen.append(count)
        return decode(self, data, count, reference)

    return watching


def test_encoded_values_elsewhere_than_in_a_patch_of_a_known_model_are_refused():
    stray = forged(msgspec.msgpack.encode({"weights": ["half", [2], b"\0\0\0\0"]}))
    with raises(PacketCorrupt, "patch"):
        codec.decode(stray, SharedModel, SPEC, limit=LIMIT)
    count = SPEC.num_parameters
    with pytest.raises(PacketCorrupt, match="known model"):
        codec.decode(packet(Everything(), "half", [count], b"\0" * 2 * count), Task, None, limit=LIMIT)
