"""Links: on the virtual clock, from files, presets and a radio cell; emulation as far as it needs no root."""

import asyncio
import itertools
import math
import os
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.helpers.errors import raises
from tests.helpers.places import ROOT
from typer.testing import CliRunner

from fleetune.protocols.errors import SettingError
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.run_toml import convert, parse_run
from fleetune.protocols.settings.simulation import FleetSection, WirelessSection
from fleetune.tools.cli import app
from fleetune.tools.links import helper_process, measure_link, network_namespaces, trace_replay, verify
from fleetune.tools.links.fleet_links import links_of
from fleetune.tools.links.link import SEGMENT_BYTES, Constant, Trace, tcp_bps
from fleetune.tools.links.presets import DAY_S, PRESETS
from fleetune.tools.links.proxy import run_proxies
from fleetune.tools.links.radio_cell import shannon_bps, wireless_link
from fleetune.tools.links.shaping import kind_of
from fleetune.tools.links.trace_csv import MAX_BYTES, read_trace

EXAMPLES = ROOT / "examples" / "links"
STAIRS = Trace((0, 10, 20, 25), (8e6, 0, 1e6, 4e6), (8e6, 8e6, 8e6, 0), period_s=40)


# On the virtual clock


def test_a_constant_link_takes_its_delay_and_the_time_of_the_bytes():
    link = Constant(uplink_bps=2e6, downlink_bps=10e6, delay_s=0.04)
    assert link.finish_s(100, 500_000, "up") == pytest.approx(102.04)
    assert link.finish_s(100, 500_000, "down") == pytest.approx(100.44)
    assert link.finish_s(100, 0, "up") == pytest.approx(100.04)
    assert link.bits(1, 4, "down") == pytest.approx(30e6)


@pytest.mark.parametrize(
    ("start_s", "num_bytes", "way", "finish_s"),
    [
        (0, 1_000_000, "up", 1),
        (9, 1_000_000, "up", 10),  # done when the outage begins, not when it ends
        (9, 1_000_001, "up", 20 + 8e-6),
        (12, 125_000, "up", 21),  # waits for the outage to end
        (24, 1_125_000, "up", 27),
        (39, 1_500_000, "up", 41),  # over the end of the period
        (0, 10_000_000 + 625_000 + 7_500_000, "up", 40),  # just what one period carries
        (400 + 39, 1_500_000, "up", 400 + 41),
        (26, 1_000_000, "down", 41),
        (0, 25_000_000, "down", 25),  # what one period carries, and it ends in an outage
        (41, 50_000_000, "down", 121),
    ],
)
def test_a_trace_carries_what_its_stretches_do(start_s, num_bytes, way, finish_s):
    assert STAIRS.finish_s(start_s, num_bytes, way) == pytest.approx(finish_s, abs=1e-9)


def test_the_rates_of_a_trace_at_a_moment():
    assert [STAIRS.rate_bps(time_s, "up") for time_s in (0, 9.99, 10, 24, 39.9, 40, 50)] == [
        *(8e6, 8e6, 0, 1e6, 4e6, 8e6, 0)
    ]
    assert STAIRS.rate_bps(65, "down") == 0


rates = st.one_of(st.just(0.0), st.floats(1e3, 1e9))


@st.composite
def traces(draw):
    lengths = draw(st.lists(st.floats(0.01, 1e4), min_size=1, max_size=8))
    times_s = list(itertools.accumulate(lengths, initial=0.0))
    rows = len(lengths)
    up, down = (draw(st.lists(rates, min_size=rows, max_size=rows).filter(any)) for _ in range(2))
    delay_s = draw(st.floats(0, 1))
    return Trace(tuple(times_s[:-1]), tuple(up), tuple(down), times_s[-1], delay_s)


@given(
    traces(), st.floats(0, 1e6), st.integers(1, 10**8), st.integers(1, 10**8), st.sampled_from(["up", "down"])
)
def test_any_trace_carries_exactly_the_bytes_in_between(trace, start_s, first, second, way):
    middle_s = trace.finish_s(start_s, first, way) - trace.delay_s
    end_s = trace.finish_s(start_s, first + second, way) - trace.delay_s
    assert start_s <= middle_s <= end_s
    assert trace.bits(start_s, middle_s, way) == pytest.approx(first * 8, rel=1e-6, abs=64)
    assert trace.finish_s(middle_s, second, way) - trace.delay_s == pytest.approx(end_s, rel=1e-6, abs=1e-3)
    assert trace.finish_s(start_s + 1, first, way) >= trace.finish_s(start_s, first, way) - 1e-6


@given(traces(), st.floats(0, 1e5), st.integers(1, 10**7))
def test_any_trace_agrees_with_walking_along_it(trace, start_s, num_bytes):
    """The closed form of `finish_s` against one stretch after the other."""
    edges = [*trace.times_s, trace.period_s]
    assume(num_bytes * 8 < 300 * trace.bits(0, trace.period_s, "up"))
    end_s = trace.finish_s(start_s, num_bytes, "up") - trace.delay_s
    carried = 0.0
    for period in range(int(start_s // trace.period_s), int(end_s // trace.period_s) + 1):
        for rate, begins_s, ends_s in zip(trace.uplink_bps, edges, edges[1:], strict=False):
            base_s = period * trace.period_s
            carried += rate * max(min(base_s + ends_s, end_s) - max(base_s + begins_s, start_s), 0)
    assert carried == pytest.approx(num_bytes * 8, rel=1e-6, abs=max(trace.uplink_bps) * 1e-9)


def test_loss_bounds_what_a_connection_gets():
    assert tcp_bps(1e6, 0.04, 0) == tcp_bps(1e6, 0, 0.1) == tcp_bps(1e6, 0.04, 0.0001) == 1e6
    by_hand = SEGMENT_BYTES * 8 * math.sqrt(1.5 / 0.005) / 0.08
    assert tcp_bps(52.87e6, 0.04, 0.005) == pytest.approx(by_hand)
    assert tcp_bps(1e12, 0.05, 1e-5) > SEGMENT_BYTES * 8 * math.sqrt(1.5 / 1e-5) / 0.1  # CUBIC's region
    lossy = Constant(52.87e6, 52.87e6, 0.04, 0.005)
    assert lossy.finish_s(0, by_hand / 8, "up") == pytest.approx(1.04)
    varying = Trace((0, 10), (52.87e6, 1e6), (1e6, 1e6), 20, 0.04, 0.005)
    assert varying.finish_s(0, by_hand / 8, "up") == pytest.approx(1.04)
    assert varying.finish_s(10, 125_000, "up") == pytest.approx(11.04)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"uplink_bps": 0}, "uplink is 0 bit/s"),
        ({"downlink_bps": math.nan}, "downlink is nan bit/s"),
        ({"delay_s": -1}, "delay is -1 s"),
        ({"loss": 1}, "loss is 100 %"),
    ],
)
def test_an_impossible_link_is_refused(change, message):
    with pytest.raises(SettingError, match=message):
        Constant(**{"uplink_bps": 1e6, "downlink_bps": 1e6} | change)


# Trace files

GOOD = "time_s,uplink_bps,downlink_bps\n5,1e6,2e6\n15,0,0\n20,3000000,4e6\n"


def written(tmp_path, content):
    path = tmp_path / "trace.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_trace_file_counts_from_its_first_row_and_repeats(tmp_path):
    spaced = "\ufeff# a comment\n\n" + GOOD.replace(",", " , ").replace("5 , 1e6", '"5" , 1e6')
    for text in (GOOD, GOOD.replace("\n", "\r\n"), spaced.replace(" , ", ", ").replace(', "', ',"')):
        trace = read_trace(written(tmp_path, text), delay_s=0.02, loss=0.01)
        assert trace == Trace((0, 10, 15), (1e6, 0, 3e6), (2e6, 0, 4e6), 20, 0.02, 0.01)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "line 1: the header must be time_s,uplink_bps,downlink_bps"),
        ("# nothing else\n", "line 1: the header must be"),
        ("5,1e6,2e6\n", "line 1: the header must be"),
        ("time_s,uplink_bps\n0,1\n", "line 1: the header must be"),
        ("time_s,uplink_bps,downlink_bps\n", "at least two rows"),
        ("time_s,uplink_bps,downlink_bps\n0,1,1\n", "at least two rows"),
        (GOOD + "19,1,1\n", "line 5: time_s must be greater"),
        (GOOD + "20,1,1\n", "line 5: time_s must be greater"),
        (GOOD + "21,1\n", "line 5: 2 values, but a row needs 3"),
        (GOOD + "21,1,1,1\n", "line 5: 4 values, but a row needs 3"),
        (GOOD + "21,-1,1\n", "line 5: a rate is negative"),
        (GOOD + "21,fast,1\n", "line 5: 'fast' is no number"),
        (GOOD + "21,nan,1\n", "line 5: nan is out of range"),
        (GOOD + "inf,1,1\n", "line 5: inf is out of range"),
        (GOOD + "21,,1\n", "line 5: '' is no number"),
        (GOOD + f"21,{'9' * 200_000},1\n", "field larger than field limit"),
        (b"\xff\xfe\x00\x01" * 50, "cannot be read as CSV"),
        ("time_s,uplink_bps,downlink_bps\n0,0,1\n5,0,1\n", "the uplink of a link trace is always 0"),
        ("time_s,uplink_bps,downlink_bps\n0,1,0\n5,1,0\n", "the downlink of a link trace is always 0"),
    ],
)
def test_a_wrong_trace_file_gets_one_line_that_names_it(tmp_path, content, message):
    path = written(tmp_path, content)
    with pytest.raises(SettingError) as caught:
        read_trace(path)
    text = str(caught.value)
    assert message in text
    assert text.startswith(str(path))
    assert "\n" not in text


def test_a_trace_file_that_is_none(tmp_path):
    with pytest.raises(SettingError, match="no such file"):
        read_trace(tmp_path / "nowhere.csv")
    with pytest.raises(SettingError, match="is a folder; expected a regular file"):
        read_trace(tmp_path)
    huge = written(tmp_path, "")
    os.truncate(huge, MAX_BYTES + 1)
    with pytest.raises(SettingError, match="longer than 64 MiB"):
        read_trace(huge)


@given(
    garbage=st.one_of(st.binary(max_size=300), st.text(max_size=100).map(lambda text: (GOOD + text).encode()))
)
def test_any_file_is_a_trace_or_one_line(tmp_path_factory, garbage):
    path = tmp_path_factory.mktemp("garbage") / "trace.csv"
    path.write_bytes(garbage)
    try:
        trace = read_trace(path)
    except SettingError as problem:
        told = str(problem)
    else:
        told = ""
        assert math.isfinite(trace.finish_s(3, 10_000, "up"))
    assert "\n" not in told


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.csv")), ids=lambda path: path.name)
def test_the_example_traces_say_that_they_are_synthetic_and_can_be_read(path):
    assert path.read_text().startswith("# synthetic")
    assert read_trace(path).finish_s(0, 1e6, "up") > 0


def test_there_are_example_traces():
    assert len(list(EXAMPLES.glob("*.csv"))) == 3


# Presets


def stretches(link):
    """(seconds, uplink rate) of each, over one day or period."""
    if isinstance(link, Constant):
        return [(DAY_S, link.uplink_bps)]
    lengths = [after - before for before, after in itertools.pairwise([*link.times_s, link.period_s])]
    return list(zip(lengths, link.uplink_bps, strict=True))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_on_average_what_it_says(name):
    preset = PRESETS[name]
    links = [preset.link(Key.of("average", index)) for index in range(200)]
    drawn = [stretch for link in links for stretch in stretches(link)]
    up_s = sum(length for length, rate in drawn if rate)
    down_s = sum(length for length, rate in drawn if not rate)
    share = preset.outages_per_day.value * preset.outage_s.value / DAY_S
    assert down_s / (up_s + down_s) == pytest.approx(share, rel=0.3)
    mean_bps = sum(length * rate for length, rate in drawn) / up_s
    assert mean_bps == pytest.approx(preset.uplink_mbps.value * 1e6, rel=0.05)
    spread = (
        math.sqrt(sum(length * (rate - mean_bps) ** 2 for length, rate in drawn if rate) / up_s) / mean_bps
    )
    assert spread == pytest.approx(preset.spread.value, rel=0.1)
    for link in links:
        assert link.delay_s == preset.delay_ms.value / 1e3
        assert link.loss == preset.loss_percent.value / 100


def test_a_presets_link_depends_on_its_key_alone():
    preset = PRESETS["4g"]
    assert preset.link(Key.of(1)) == preset.link(Key.of(1)) != preset.link(Key.of(2))
    assert isinstance(PRESETS["lan"].link(Key.of(1)), Constant)


def test_every_figure_has_a_source_or_is_an_estimate():
    assert set(PRESETS) == {"4g", "rural-dsl", "lora-backhaul", "factory-wifi", "lan"}
    for preset in PRESETS.values():
        for _, figure in preset.figures():
            assert figure.source in ("estimate", "by definition") or figure.source.startswith("https://")
            assert figure.value >= 0


# The radio cell


def test_shannons_rate():
    """20 MHz, 26.5 dBm over 300 m: 10^-0.35 W * 1e-4 * 300^-4 over 20e6 * 10^-20.4 W."""
    ratio = 10**-0.35 * 1e-4 * 300**-4 / (20e6 * 10**-20.4)
    received_dbm = 26.5 - 40 - 40 * math.log10(300)
    assert shannon_bps(20e6, received_dbm, -174) == pytest.approx(20e6 * math.log2(1 + ratio))
    assert shannon_bps(50e6, -103.0103, -180) == pytest.approx(50e6, rel=1e-4)  # as strong as the noise


def test_a_cell_without_chance_is_the_formula():
    cell = WirelessSection(
        (20, 20), (26.5, 26.5), (300, 300), uplink_interference_db=(0, 0), downlink_interference_db=(3, 0)
    )
    link = wireless_link(cell, Key.of(0))
    received_dbm = -40 - 40 * math.log10(300)
    assert link.uplink_bps == pytest.approx(shannon_bps(20e6, 26.5 + received_dbm, -174))
    assert link.downlink_bps == pytest.approx(shannon_bps(50e6, 30 + received_dbm, -171))


def test_the_papers_cell_has_the_mean_rates_that_are_documented():
    links = [wireless_link(WirelessSection(), Key.of("cell", index)) for index in range(5000)]
    assert sum(link.uplink_bps for link in links) / 5000 == pytest.approx(7e6, rel=0.06)
    assert sum(link.downlink_bps for link in links) / 5000 == pytest.approx(16.5e6, rel=0.06)
    assert 5000 / sum(1 / link.uplink_bps for link in links) == pytest.approx(0.7e6, rel=0.1)


# The section [fleet]


def fleet(**keys):
    return convert(keys, FleetSection, "fleet")


def test_links_are_dealt_in_order_and_the_rest_keep_theirs(tmp_path):
    path = written(tmp_path, GOOD)
    links = links_of(fleet(devices=5, links={"4g": 2, str(path): 1, "lan": 1}), seed=3)
    assert [type(link) for link in links] == [Trace, Trace, Trace, Constant, type(None)]
    assert links[0] != links[1]
    assert links[2] == read_trace(path)
    assert links_of(fleet(devices=5, links={"4g": 2}), 3)[:2] == links[:2]
    assert links_of(fleet(devices=5, links={"4g": 2}), 4)[0] != links[0]


def test_a_cell_takes_the_devices_without_a_link():
    links = links_of(fleet(devices=4, links={"lan": 1}, wireless=True), seed=0)
    assert links[0] == PRESETS["lan"].link(Key.of(0))
    assert len({link.uplink_bps for link in links}) == 4
    assert links[1:] == links_of(fleet(devices=4, wireless=True), seed=0)[1:]  # a place of its own for each
    near = links_of(fleet(devices=4, wireless={"distance_m": [100, 100]}), seed=0)
    assert min(link.downlink_bps for link in near) > max(link.downlink_bps for link in links[1:] if link) / 3
    assert links_of(fleet(devices=4, wireless=False), seed=0) == [None] * 4


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"links": {"5g": 1}},
            "no link preset '5g'; use one of 4g, rural-dsl, lora-backhaul, factory-wifi, lan",
        ),
        ({"links": {"5g": 0}}, "no link preset '5g'"),
        ({"links": {"nowhere.csv": 1}}, "nowhere.csv: no such file"),
        ({"links": {"4g": 3}}, "fleet.links lists 3 links, but fleet.devices = 2"),
        ({"links": {"4g": -1}}, "fleet.links"),
        ({"wireless": {"distance": [1, 2]}}, "did you mean `distance_m`?"),
        ({"wireless": {"distance_m": [0, 2]}}, "fleet.wireless.distance_m[0]: expected `float` >= 1"),
        ({"wireless": {"power_dbm": [30, 23]}}, "power_dbm = [30, 23]: the smaller number comes first"),
    ],
)
def test_a_wrong_section_gets_one_line(keys, message):
    with pytest.raises(SettingError, match=re.escape(message)) as caught:
        links_of(fleet(devices=2, **keys), seed=0)
    assert "\n" not in str(caught.value)


def test_a_whole_run_file_may_have_them():
    run = {"name": "x"}, {"name": "mlp"}, {"name": "fedavg"}
    content = dict(zip(("run", "model", "method"), run, strict=True))
    settings = parse_run(content | {"fleet": {"links": {"4g": 3}, "wireless": {"noise_dbm_hz": -170}}})
    assert settings.fleet.wireless.noise_dbm_hz == -170


# Emulation, as far as it goes without root


def test_what_a_link_is_made_of():
    assert kind_of(0, 0, netem=True) == kind_of(1e-4, 0, netem=False) == "plain"
    assert kind_of(0.04, 0, netem=True) == kind_of(0, 0.01, netem=True) == "netem"
    if Path("/dev/net/tun").exists():
        assert kind_of(0.04, 0, netem=False) == kind_of(0, 0.01, netem=False) == "relay"


def test_a_trace_is_replayed_row_by_row_for_ever():
    steps = list(itertools.islice(trace_replay.changes(STAIRS, index=2), 6))
    assert [step[0] for step in steps] == [0, 10, 20, 25, 40, 50]
    assert steps[5] == (50, 2, (0, 8e6))


def test_a_lump_of_bytes_does_not_pass_for_speed():
    """1000 bytes a second in steps of 10 ms, but for two holes whose bytes come all at once when they end."""
    steps = [(100 + step / 100, step * 10) for step in range(401)]
    holes = [one for one in steps if not (1.0 <= one[0] - 100 < 1.3 or 3.7 <= one[0] - 100 < 3.95)]
    slow_start = [(at_s, num_bytes // 4 if at_s < 100.5 else num_bytes - 375) for at_s, num_bytes in holes]
    for arrivals in (steps, holes, slow_start):
        assert measure_link.flow_of(arrivals).bps == pytest.approx(8000, rel=0.001)
    assert measure_link.flow_of([(100.0, 0)]).num_bytes == 0


def found(up, down, round_trip_s=0.08, lost=0):
    flow = measure_link.Flow(num_bytes=0, started_s=10, ended_s=18)
    flows = (replace(flow, num_bytes=rate) for rate in (up, down))  # 8 s: bits a second = bytes
    return measure_link.Measured(*flows, pings=200, lost=lost, round_trip_s=round_trip_s)


@pytest.mark.parametrize(
    ("link", "measured", "problems"),
    [
        (Constant(2e6, 10e6, 0.04), found(1.95e6, 10.2e6), []),
        (Constant(2e6, 10e6, 0.04), found(1.85e6, 10.2e6), ["up 1.85 instead of 2 Mbit/s"]),
        (Constant(2e6, 10e6, 0.04), found(2e6, 11e6), ["down 11 instead of 10 Mbit/s"]),
        (Constant(2e6, 10e6, 0.04), found(2e6, 10e6, 0.1), ["round trip 100.0 instead of 80.0 ms"]),
        (Constant(2e6, 10e6, 0.04), found(2e6, 10e6, None), ["no datagram came back"]),
        (Constant(9e6, 9e6, 0.04, 0.005), found(1e6, 5e6), []),  # loss leaves about 2.5, give or take
        (Constant(9e6, 9e6, 0.04, 0.005), found(0.5e6, 9.6e6), ["up 0.5 instead", "down 9.6 instead"]),
    ],
)
def test_the_verdict_on_a_measured_link(link, measured, problems):
    plan = network_namespaces.Plan((link,), ("plain",), started_s=5)
    verdict = verify.judge(plan, 0, measured)
    assert len(verdict.problems) == len(problems)
    assert all(text.startswith(start) for text, start in zip(verdict.problems, problems, strict=True))


def test_a_traces_verdict_is_of_the_time_of_the_transfer():
    plan = network_namespaces.Plan((replace_delay(STAIRS, 0.04),), ("plain",), started_s=5)
    verdict = verify.judge(plan, 0, found(1e6, 8e6))  # 5 to 13 s after the start: 8 Mbit/s, then an outage
    assert verdict.expected_bps == (pytest.approx(5e6), pytest.approx(8e6))


def replace_delay(trace, delay_s):
    return Trace(trace.times_s, trace.uplink_bps, trace.downlink_bps, trace.period_s, delay_s)


HELPER = """
import sys, time
from pathlib import Path
from fleetune.tools.links import helper_process
network = helper_process.detach(Path(sys.argv[1]))
(Path(sys.argv[1]).parent / "began").touch()
give_up_at = time.monotonic() + 5
while helper_process.is_wanted(network) or "stubborn" in sys.argv and time.monotonic() < give_up_at:
    time.sleep(0.02)
(Path(sys.argv[1]).parent / "ended").touch()
"""


def start_helper(file, *words):
    return subprocess.run(
        [sys.executable, "-c", HELPER, str(file), *words], capture_output=True, check=False, timeout=60
    ).returncode


def wait_until(happened):
    give_up_at = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < give_up_at
        time.sleep(0.02)


@pytest.fixture
def alive(tmp_path):
    file = tmp_path / helper_process.ALIVE
    file.touch()
    return file


def test_helpers_have_ended_when_their_network_is_gone(alive):
    assert [start_helper(alive) for _ in range(2)] == [0, 0]
    wait_until((alive.parent / "began").exists)
    assert not (alive.parent / "ended").exists()
    helper_process.end_helpers(alive)
    assert not alive.exists()
    assert (alive.parent / "ended").exists()
    helper_process.end_helpers(alive)  # nothing to do
    assert start_helper(alive) == 1, "it comes too late, and never begins"


def test_a_helper_that_does_not_end_is_one_line(alive, monkeypatch):
    assert start_helper(alive, "stubborn") == 0
    monkeypatch.setattr(helper_process, "STOP_S", 0.1)
    with raises(TimeoutError, str(alive.parent)):
        helper_process.end_helpers(alive)


def test_what_still_runs_can_be_found(tmp_path, monkeypatch):
    def never_ends(alive):
        raise TimeoutError(f"a helper process of {alive.parent} did not end")

    monkeypatch.setattr(network_namespaces, "RUN", tmp_path)
    monkeypatch.setattr(helper_process, "end_helpers", never_ends)
    network_namespaces.folder_of("net").mkdir()
    with raises(SettingError, "fleetune-link.net", remedy=("pgrep -f fleetune.tools.links", "link down")):
        network_namespaces.down("net")


def test_a_replay_that_is_late_ends_with_its_network(alive, monkeypatch):
    """It is late by a year, so it never waits."""
    plan = network_namespaces.Plan((STAIRS,), ("plain",), time.monotonic() - 365 * DAY_S)
    calls = []

    def set_rates(*call):
        calls.append(call)
        if len(calls) == 3:
            alive.unlink()
        assert len(calls) <= 3, "the network is gone"

    monkeypatch.setattr(trace_replay, "set_rates", set_rates)
    trace_replay.replay("net", plan, helper_process.hold(alive))
    assert len(calls) == 3


def edge_sim(*words):
    return CliRunner().invoke(app, ["link", *words])


@pytest.mark.parametrize("command", ["up --up 1 --down 1", "status", "down"])
def test_without_root_one_line_says_so(monkeypatch, command):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(network_namespaces.shutil, "which", lambda word: word)
    outcome = edge_sim(*command.split())
    assert outcome.exit_code == 2
    assert outcome.stderr.count("\n") == 1
    assert "needs root" in outcome.stderr
    assert ("edge-sim link proxy" in outcome.stderr) == command.startswith("up")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "say what the links carry"),
        ("--up 1", "give both --up and --down"),
        ("--up 1 --down 1 --preset 4g", "say what the links carry"),
        ("--preset 5g", "no link preset '5g'"),
        ("--preset 4g --delay 5", "a preset has its own"),
        ("--trace nowhere.csv", "nowhere.csv: no such file"),
        ("--run nowhere.toml", "nowhere.toml: no such file"),
        ("--up 0 --down 1", "uplink is 0 bit/s"),
        ("--up nan --down 1", "uplink is nan bit/s"),
        ("--up 1 --down 1 --delay -1", "delay is -0.001 s"),
        ("--up 1 --down 1 --loss 100", "loss is 100 %"),
    ],
)
def test_a_wrong_option_gets_one_line(monkeypatch, command, message):
    monkeypatch.setattr(network_namespaces, "obstacle", lambda: None)
    outcome = edge_sim("up", *command.split())
    assert outcome.exit_code == 2
    assert message in outcome.stderr
    assert outcome.stderr.count("\n") == 1


def test_an_impossible_name_of_a_network():
    for name in ("", "a b", "../etc", "x" * 33):
        with pytest.raises(SettingError, match="is not a valid name of a network"):
            network_namespaces.check_name(name)


def test_the_presets_are_listed_with_their_sources():
    listed = edge_sim("presets")
    assert listed.exit_code == 0
    assert all(name in listed.stdout for name in PRESETS)
    assert "https://www.telecomengine.com" in listed.stdout


@contextmanager
def proxies(links, port):
    """Run proxies in a thread of their own; gives their ports."""
    ready, ports = threading.Event(), []
    loop = asyncio.new_event_loop()

    def on_ready(opened):
        ports.extend(opened)
        ready.set()

    async def run():
        task.append(asyncio.current_task())
        await run_proxies(links, ("127.0.0.1", port), on_ready)

    def serve():
        with pytest.raises(asyncio.CancelledError):
            loop.run_until_complete(run())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    task = []
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert ready.wait(30)
        yield ports
    finally:
        loop.call_soon_threadsafe(task[0].cancel)
        thread.join()


@contextmanager
def echo_server():
    """Everything that comes goes back; gives its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        with suppress(OSError):
            while True:
                with listener.accept()[0] as wire:
                    while data := wire.recv(1 << 16):
                        wire.sendall(data)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def there_and_back(port, payload):
    def send():
        wire.sendall(payload)
        wire.shutdown(socket.SHUT_WR)

    with socket.create_connection(("127.0.0.1", port)) as wire:
        sender = threading.Thread(target=send)
        sender.start()
        back = b""
        while data := wire.recv(1 << 16):
            back += data
        sender.join()
    return back


def test_a_proxy_is_never_faster_than_its_link_and_changes_nothing():
    """Lower bounds only: a busy machine makes everything later."""
    links = [Constant(2e6, 8e6, 0.05), Constant(8e6, 2e6)]
    payload = Key.of("proxy").generator().bytes(100_000)
    with echo_server() as echo, proxies(links, echo) as ports:
        for link, port in zip(links, ports, strict=True):
            began_at = time.monotonic()
            assert there_and_back(port, payload) == payload
            slower_bps = min(link.uplink_bps, link.downlink_bps)  # the other way goes on at the same time
            assert time.monotonic() - began_at >= 2 * link.delay_s + len(payload) * 8 / slower_bps


def test_a_proxy_without_a_broker_ends_its_connections():
    with echo_server() as nobody:
        pass
    with proxies([Constant(1e6, 1e6)], nobody) as ports:
        assert there_and_back(ports[0], b"") == b""
