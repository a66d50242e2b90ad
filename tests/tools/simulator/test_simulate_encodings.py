"""Updates and tasks written by encodings: some keep every bit, others lose nothing for good."""

import numpy as np
import pytest
from tests.helpers.nightly import sooner
from tests.tools.simulator.test_simulate import BASE, play

from fleetune.protocols.errors import SettingError
from fleetune.protocols.methods import REGISTRY as METHODS
from fleetune.protocols.settings.run_toml import parse_run
from fleetune.protocols.update import encodings

NAMES = [name for name in encodings.REGISTRY if name != encodings.RAW]
LOSSLESS = [name for name in NAMES if encodings.find(name).lossless]
LOSSY = [name for name in NAMES if not encodings.find(name).lossless]
SMALL = {"run": {"name": "sim", "rounds": 2}, "fleet": {"devices": 4}}


def asked(name, **sections):
    down = "lowrank" if encodings.find(name).on_average else name  # such are not for tasks
    return {"encoding": {"up": name, "down": down}, **sections}


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize(
    "method",
    sooner(
        ["fedavg", "fedspu", "kapc", "fedpurin", "dc-pfl", "srp-pfed", "fedcac"],
        kept=("fedspu", "fedpurin"),
    ),
)
def test_every_bit_is_as_without_it(tmp_path, name, method):
    chosen = {"method": {"name": method}, **SMALL}
    _, plain, weights = play(tmp_path, "raw", **asked("raw", **chosen))
    _, encoded, same = play(tmp_path, name, **asked(name, **chosen))
    assert same.tobytes() == weights.tobytes()
    assert encoded.bytes.up < plain.bytes.up
    assert encoded.bytes.down < plain.bytes.down


@pytest.mark.parametrize("name", sooner(NAMES, kept=("int8", "sparse")))
def test_a_semi_asynchronous_round_has_its_base_too(tmp_path, name):
    section = {"round": {"mode": "buffer", "participants": 2, "buffer": 2}}
    chosen = {"method": {"name": "fedavg"}, **SMALL, **section}
    _, plain, weights = play(tmp_path, "raw", **asked("raw", **chosen))
    _, encoded, found = play(tmp_path, name, **asked(name, **chosen))
    assert plain.rounds == encoded.rounds == 2
    if name in LOSSLESS:
        assert found.tobytes() == weights.tobytes()


@pytest.mark.parametrize("name", sooner(LOSSY, kept=2))
def test_a_few_bits_a_value_learn_as_all_of_them_do(tmp_path, name):
    chosen = {"method": {"name": "fedavg"}, "run": {"name": "sim", "rounds": 6}, "fleet": {"devices": 4}}
    _, plain, _ = play(tmp_path, "raw", **asked("raw", **chosen))
    sections = asked(name, **chosen)
    if encodings.find(name).on_average:  # 24 updates of few samples are few to take a mean of
        sections["encoding"]["up"] = {"name": name, "bits": 1}
    _, encoded, _ = play(tmp_path, name, **sections)
    assert encoded.bytes.up < 0.6 * plain.bytes.up
    assert encoded.bytes.down < 0.7 * plain.bytes.down
    assert encoded.accuracy.before_mean >= plain.accuracy.before_mean - 0.05


@pytest.mark.parametrize("name", LOSSLESS)
def test_devices_that_come_and_go_and_are_late_are_still_sent_differences(tmp_path, name):
    chosen = {
        "method": {"name": "fedspu"},
        "run": {"name": "sim", "rounds": 5},
        "fleet": {"devices": 6, "availability": 0.7},
        "round": {"participants": 2, "quorum": 1, "deadline_s": 20, "over_selection": 2},
    }
    _, plain, _ = play(tmp_path, "raw", **asked("raw", **chosen))
    _, encoded, found = play(tmp_path, name, **asked(name, **chosen))
    assert plain.rounds == encoded.rounds == 5
    assert np.isfinite(found).all()
    assert encoded.bytes.down < 0.7 * plain.bytes.down


@pytest.mark.parametrize("method", sooner(sorted(METHODS)))
def test_every_method_goes_through_its_rounds(tmp_path, method):
    _, encoded, weights = play(tmp_path, "int4", **asked("int4", method={"name": method}, **SMALL))
    assert encoded.rounds == 2
    assert np.isfinite(weights).all()


@pytest.mark.parametrize(
    ("up", "message"),
    [
        ("losless", "no encoding 'losless'"),
        ({"density": 0.1}, "an encoding needs a name"),
        ({"name": "raw", "density": 0.1}, "encoding raw has no setting 'density'"),
    ],
)
def test_an_encoding_that_is_none_is_one_line(up, message):
    with pytest.raises(SettingError, match=message):
        parse_run({**BASE, "encoding": {"up": up}})


@pytest.mark.parametrize("method", sooner(sorted(METHODS), kept=("fedavg", "fedspu", "dc-pfl")))
def test_a_compact_run_learns_the_same_bits_from_fewer_bytes(tmp_path, method):
    chosen = asked("int4", method={"name": method}, **SMALL)
    _, plain, weights = play(tmp_path, "long", **chosen)
    chosen["encoding"]["compact"] = True
    _, short, same = play(tmp_path, "compact", **chosen)
    assert same.tobytes() == weights.tobytes()
    assert short.accuracy == plain.accuracy
    assert short.bytes.down == plain.bytes.down
    assert short.bytes.up < plain.bytes.up
