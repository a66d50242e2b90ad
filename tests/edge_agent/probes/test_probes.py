"""What boards tell: trees of files that stand for each, with garbage, and going while they are read."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.helpers import boards
from tests.helpers.boards import no_commands
from tests.helpers.nightly import sooner
from tests.helpers.places import ROOT

from fleetune.edge_agent.probes import board_identity, files_and_commands, metered_network, temperature
from fleetune.edge_agent.probes.conditions import BoardSensors, read_conditions
from fleetune.edge_agent.probes.energy import Counters, EnergyMeter, Integral, rapl_counters
from fleetune.edge_agent.probes.files_and_commands import CachedCommands, run_command
from fleetune.edge_agent.probes.memory import (
    PeakMemory,
    attainable_bytes,
    cgroup_limit_bytes,
    process_memory,
    total_bytes,
)
from fleetune.edge_agent.probes.power_draw import Draw, read_draw
from fleetune.edge_agent.probes.power_supply import kernel_supply, read_supply, termux_supply
from fleetune.protocols.conditions import UNKNOWN, Conditions

MIB = 2**20


class Clock:
    """Stands still, or goes on by `step_s` each time it is asked."""

    def __init__(self, step_s=0.0):
        self.now, self.step_s = 1000.0, step_s

    def __call__(self):
        self.now += self.step_s
        return self.now


# Each board

WANTED = {
    boards.pi_5: (
        "raspberry-pi-5",
        Conditions(watts=(0.37 + 1.65 + 3.2) * 1.1451 + 0.5879, celsius=48.2, throttled=False, metered=False),
    ),
    boards.pi_4_hot_on_a_modem: (
        "raspberry-pi-4b",
        Conditions(celsius=81.5, throttled=True, metered=True),
    ),
    boards.pi_zero: ("raspberry-pi-zero-2w", Conditions(celsius=40)),
    boards.jetson_nano: ("jetson-nano", Conditions(watts=2.35, celsius=41, throttled=False)),
    boards.jetson_orin_nano: ("jetson-orin-nano", Conditions(watts=6, celsius=50.25)),
    boards.jetson_agx_orin: ("generic", Conditions(watts=9)),
    boards.jetson_thor: ("generic", Conditions(watts=27.5)),
    boards.coral: ("coral-dev-board", Conditions(celsius=55)),
    boards.n100: ("n100-gateway", Conditions(power="mains", celsius=52, throttled=False)),
    boards.laptop: ("generic", Conditions(power="battery", battery=0.6, watts=12.5, celsius=31.4)),
    boards.phone: (
        "phone-low",
        Conditions(power="battery", battery=0.72, watts=0.423 * 3.9, celsius=28.5, metered=True),
    ),
}


@pytest.mark.parametrize("make", boards.ALL, ids=lambda make: make.__name__)
def test_each_board_is_recognised_and_read(make, tmp_path):
    board = make()
    root = board.build(tmp_path)
    name, wanted = WANTED[make]
    assert board_identity.board_name(root, board.run) == name
    found = read_conditions(root, board.run)
    known = {key: value for key, value in msgspec.structs.asdict(found).items() if key != "memory_bytes"}
    for key, value in known.items():
        assert value == (
            pytest.approx(getattr(wanted, key)) if isinstance(value, float) else getattr(wanted, key)
        ), key


def test_nothing_there_is_unknown_and_never_zero(tmp_path):
    assert read_conditions(tmp_path, no_commands) == UNKNOWN
    assert read_conditions(tmp_path / "gone", no_commands) == UNKNOWN
    assert process_memory(tmp_path).resident is total_bytes(tmp_path) is None
    assert board_identity.model(tmp_path, no_commands) is None
    assert (board_identity.processor(tmp_path), board_identity.num_cores(tmp_path)) == (None, None)
    assert board_identity.board_name(tmp_path, no_commands) == "generic"
    assert PeakMemory(tmp_path).read() is None


def test_this_machine_is_read_too():
    found = read_conditions()
    assert found.memory_bytes > 10 * MIB
    assert board_identity.num_cores() >= 1
    assert process_memory().resident <= process_memory().peak <= total_bytes()


# Garbage, and files that go

GARBAGE = st.one_of(
    st.binary(max_size=60),
    st.sampled_from(
        [
            b"",
            b"nan",
            b"inf",
            b"-1",
            b"1e400",
            b"0x",
            b"9" * 400,
            b"\xff\xfe",
            b"1\n2",
            b"u 9",
            b"{",
            b"[1]",
            b"max",
        ]
    ),
    st.integers(-(10**30), 10**30).map(lambda number: str(number).encode()),
    st.text("0123456789:/ -,()\n.%AkBmW\\", max_size=80).map(str.encode),
)


@pytest.mark.parametrize("make", sooner(boards.ALL, kept=4), ids=lambda make: make.__name__)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_garbage_is_unknown_or_in_range(make, tmp_path, data):
    board = make()
    board.files |= {
        "proc/self/cgroup": "",
        "proc/self/mountinfo": "",
        "proc/self/limits": "",
        "proc/net/route": "",
    }
    root = tmp_path / "root"
    for path in board.files:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data.draw(GARBAGE))
    answers = {words: data.draw(GARBAGE).decode(errors="replace") for words in board.commands}
    found = read_conditions(root, lambda words: answers.get(" ".join(words)))
    assert msgspec.convert(msgspec.to_builtins(found), Conditions) == found  # every bound of it holds
    assert found.battery is None or 0 <= found.battery <= 1
    assert board_identity.num_cores(root) is None or board_identity.num_cores(root) > 0
    assert isinstance(board_identity.board_name(root, lambda words: answers.get(" ".join(words))), str)
    meter = EnergyMeter(root, lambda words: answers.get(" ".join(words)), clock=Clock(1.0))
    meter.start()
    joules = meter.stop()
    assert joules is None or joules >= 0
    shutil.rmtree(root)


@pytest.mark.parametrize("make", boards.ALL, ids=lambda make: make.__name__)
def test_files_that_go_while_they_are_read(make, tmp_path, monkeypatch):
    board, opened = make(), 0
    root = board.build(tmp_path / "whole")
    real = Path.open

    def counting(path, *words, **options):
        nonlocal opened
        opened += 1
        return real(path, *words, **options)

    monkeypatch.setattr(Path, "open", counting)
    whole = read_conditions(root, board.run)
    for last in range(opened):
        root, left = board.build(tmp_path / str(last)), last

        def vanishing(path, *words, root=root, **options):
            nonlocal left
            if not left:
                shutil.rmtree(root, ignore_errors=True)
            left -= 1
            return real(path, *words, **options)

        monkeypatch.setattr(Path, "open", vanishing)
        found = read_conditions(root, board.run)
        for name in ("power", "throttled", "metered"):
            assert getattr(found, name) in (None, getattr(whole, name))


# Memory


def grouped(tmp_path, cgroup, mounts, **files):
    """A process of 400,000 kB, 310,000 of them anonymous, on a machine with 6,000 MiB to spare, in groups."""
    board = boards.FakeBoard(boards.memory(8000, 6000) | files)
    board.files |= {"proc/self/cgroup": cgroup, "proc/self/mountinfo": mounts}
    return board.build(tmp_path)


V2 = "31 23 0:28 / /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw\n"
V1 = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
ANON = 310_000 * 1024


def group(folder, limit, usage, cache, version=2):
    names = ("memory.max", "memory.current", "") if version == 2 else None
    names = names or ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    stat = f"anon 5\n{names[2]}inactive_file {cache // 2}\n{names[2]}active_file {cache - cache // 2}\n"
    return {
        f"{folder}/{names[0]}": str(limit),
        f"{folder}/{names[1]}": str(usage),
        f"{folder}/memory.stat": stat,
    }


def test_without_limits_it_may_take_what_is_available_and_what_it_has(tmp_path):
    assert attainable_bytes(grouped(tmp_path, "", "")) == 6000 * MIB + ANON


def test_cgroup_v2_counts_others_and_not_the_page_cache(tmp_path):
    files = group("sys/fs/cgroup/user/agent", 512 * MIB, 400 * MIB, 50 * MIB)
    root = grouped(tmp_path, "0::/user/agent\n", V2, **files)
    assert attainable_bytes(root) == 512 * MIB - (350 * MIB - ANON)
    assert cgroup_limit_bytes(root) == 512 * MIB


def test_a_limit_on_an_outer_group_counts_with_what_its_other_groups_use(tmp_path):
    files = group("sys/fs/cgroup/user/agent", "max", 310 * MIB, 0)
    files |= group("sys/fs/cgroup/user", 1000 * MIB, 900 * MIB, 0)
    root = grouped(tmp_path, "0::/user/agent\n", V2, **files)
    assert attainable_bytes(root) == 1000 * MIB - (900 * MIB - ANON)


def test_memory_high_is_a_limit_too(tmp_path):
    files = group("sys/fs/cgroup/agent", 900 * MIB, 320 * MIB, 0)
    files["sys/fs/cgroup/agent/memory.high"] = str(600 * MIB)
    root = grouped(tmp_path, "0::/agent\n", V2, **files)
    assert attainable_bytes(root) == 600 * MIB - (320 * MIB - ANON)


def test_cgroup_v1_beside_an_empty_v2_as_on_a_hybrid_machine(tmp_path):
    mounts = V1 + "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
    top, inner = "sys/fs/cgroup/memory", "sys/fs/cgroup/memory/a/b"
    files = group(top, 9223372036854771712, 7000 * MIB, 0, 1) | group(
        inner, 512 * MIB, 330 * MIB, 20 * MIB, 1
    )
    root = grouped(tmp_path, "4:memory:/a/b\n1:cpu:/x\n0::/\n", mounts, **files)
    assert attainable_bytes(root) == 512 * MIB - (310 * MIB - ANON)


def test_a_container_sees_its_own_group_as_the_top(tmp_path):
    mounts = "35 31 0:32 /docker/17 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    files = group("sys/fs/cgroup/memory", 512 * MIB, 310 * MIB, 0, 1)
    root = grouped(tmp_path, "4:memory:/docker/17\n", mounts, **files)
    assert cgroup_limit_bytes(root) == 512 * MIB
    outside = "35 31 0:32 /../.. /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    (root / "proc/self/mountinfo").write_text(outside)
    (root / "proc/self/cgroup").write_text("4:memory:/../../x\n")
    assert cgroup_limit_bytes(root) == 512 * MIB


def test_mount_points_with_spaces(tmp_path):
    files = group("sys/my groups/a", 512 * MIB, 310 * MIB, 0)
    root = grouped(tmp_path, "0::/a\n", V2.replace("/sys/fs/cgroup", "/sys/my\\040groups"), **files)
    assert cgroup_limit_bytes(root) == 512 * MIB


def test_a_group_that_hides_its_usage_bounds_by_its_limit(tmp_path):
    root = grouped(tmp_path, "0::/a\n", V2, **{"sys/fs/cgroup/a/memory.max": str(300 * MIB)})
    assert attainable_bytes(root) == 300 * MIB


def test_a_limit_on_the_address_space_bounds_growth(tmp_path):
    root = grouped(tmp_path, "", "")
    limits = "Limit  Soft Limit  Hard Limit  Units\nMax data size  unlimited  unlimited  bytes\n"
    (root / "proc/self/limits").write_text(
        limits + f"Max address space  {2_000_000 * 1024}  unlimited  bytes\n"
    )
    assert attainable_bytes(root) == (400_000 + 100_000) * 1024


CAPPED = (
    "import sys; from fleetune.edge_agent.probes.memory import attainable_bytes; print(attainable_bytes())"
)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_a_real_limit_on_the_address_space():
    def cap():
        resource.setrlimit(resource.RLIMIT_AS, (700 * MIB, 700 * MIB))

    done = subprocess.run(
        [sys.executable, "-c", CAPPED], capture_output=True, check=True, preexec_fn=cap, cwd=ROOT
    )
    assert 10 * MIB < int(done.stdout) < 700 * MIB


@pytest.fixture
def real_group():
    """A memory group of version 1 below our own; for root on a machine that has it."""
    top = Path("/sys/fs/cgroup/memory")
    ours = next((line for line in own_groups() if "memory" in line[1].split(",")), None)
    if ours is None or not os.access(top, os.W_OK) or not (top / "cgroup.procs").exists():
        pytest.skip("no memory group of version 1 that we may write to")
    folder = top / ours[2].lstrip("/") / f"fleetune-test-{os.getpid()}"
    folder.mkdir()
    yield folder
    folder.rmdir()


def own_groups():
    path = Path("/proc/self/cgroup")
    return [line.split(":", 2) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_real_group(real_group):
    (real_group / "memory.limit_in_bytes").write_text(str(300 * MIB))
    join = f"open({str(real_group / 'cgroup.procs')!r}, 'w').write('0');"
    done = subprocess.run([sys.executable, "-c", join + CAPPED], capture_output=True, check=True, cwd=ROOT)
    assert 200 * MIB < int(done.stdout) <= 300 * MIB


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="the kernel keeps no peak to clear"
)
def test_the_peak_of_an_interval():
    peak = PeakMemory()
    peak.reset()
    before = peak.read()
    block = bytearray(80 * MIB)
    block[::4096] = b"x" * len(block[::4096])
    during = peak.read()
    del block
    peak.reset()
    assert during - before > 70 * MIB
    assert peak.read() < during - 50 * MIB


def test_a_peak_that_cannot_be_forgotten_is_unknown_until_it_is_passed(tmp_path):
    root = grouped(tmp_path, "", "")
    peak = PeakMemory(root)
    peak.reset()
    assert peak.read() is None
    status = root / "proc/self/status"
    status.write_text(boards.STATUS.replace("420000", "430000"))
    assert peak.read() == 430_000 * 1024
    (root / "proc/self/clear_refs").write_text("")
    status.write_text(boards.STATUS.replace("420000", "400100"))
    peak.reset()
    assert (root / "proc/self/clear_refs").read_text() == "5"
    assert peak.read() == 400_100 * 1024


# Power


@pytest.mark.parametrize(
    ("status", "online", "power"),
    [
        ("Charging", 1, "charging"),
        ("Discharging", 1, "battery"),  # more is drawn than the charger gives
        ("Full", 1, "mains"),
        ("Not charging", 0, "mains"),
        ("Unknown", 0, None),
    ],
)
def test_power_by_the_batterys_status(tmp_path, status, online, power):
    files = boards.supply("usb", type="USB", online=online)
    files |= boards.supply(
        "battery", type="Battery", status=status, capacity=40, current_now=-500_000, voltage_now=4_000_000
    )
    found = kernel_supply(boards.FakeBoard(files).build(tmp_path))
    assert (found.power, found.charge) == (power, 0.4)
    assert found.watts == (pytest.approx(2.0) if power == "battery" else None)


def test_a_mains_supply_alone(tmp_path):
    assert (
        kernel_supply(boards.FakeBoard(boards.supply("AC", type="Mains", online=1)).build(tmp_path)).power
        == "mains"
    )
    assert (
        kernel_supply(boards.FakeBoard(boards.supply("AC", type="Mains", online=0)).build(tmp_path)).power
        is None
    )


def test_one_silent_battery_of_two_leaves_the_draw_unknown(tmp_path):
    board = boards.laptop()
    board.files["sys/class/power_supply/BAT1/status"] = "Discharging"
    board.files["sys/class/power_supply/BAT1/power_now"] = "garbage"
    assert kernel_supply(board.build(tmp_path)).watts is None


def test_phones_that_count_milliamperes_give_no_watts(tmp_path):
    board = boards.phone()
    board.commands["termux-battery-status"] = board.commands["termux-battery-status"].replace(
        "-423000", "423"
    )
    assert termux_supply(board.run).watts is None
    board.commands["termux-battery-status"] = (
        '{"status": "CHARGING", "plugged": "PLUGGED_AC", "percentage": 9}'
    )
    found = read_supply(tmp_path, board.run)
    assert (found.power, found.charge, found.watts, found.sensor) == ("charging", 0.09, None, "termux")


def test_rails_that_do_not_add_up_to_a_board_are_no_draw(tmp_path):
    root = boards.FakeBoard(boards.hwmon_rails("0040", VDD_GPU=(5.0, 900), VDD_SOC=(5.0, 100))).build(
        tmp_path
    )
    assert read_draw(root, no_commands) is None


def test_a_broken_input_rail_is_not_replaced_by_a_part_of_it(tmp_path):
    rails = boards.iio_rails("0-0040", VDD_IN=4000, VDD_GPU=100, VDD_CPU=200)
    rails |= boards.iio_rails("0-0042", VDD_MUX=2000, VDD_5V_IO_SYS=30, VDD_3V3_SYS=40)
    root = boards.FakeBoard(rails).build(tmp_path)
    assert read_draw(root, no_commands) == Draw(6.0, "ina3221")
    (root / "sys/bus/i2c/drivers/ina3221x/0-0042/iio:device0/in_power0_input").write_text("?")
    assert read_draw(root, no_commands) is None


# Energy


def test_draw_over_time_by_trapezoids():
    watts = iter([2.0, 4.0, None, 4.0])
    tally = Integral(lambda: next(watts), longest_gap_s=10)
    for now in (0.0, 2.0, 5.0, 7.0):
        tally.take(now)
    assert tally.joules == 6 + 20


def test_a_sensor_that_falls_silent_leaves_the_sum_unknown():
    for readings in ([2.0, None, None, 2.0], [2.0, 2.0, None, None], [None, None, None, 2.0]):
        watts = iter(readings)
        tally = Integral(lambda watts=watts: next(watts), longest_gap_s=10)
        for now in (0.0, 6.0, 12.0, 18.0):
            tally.take(now)
        assert tally.joules is None
    assert Integral(lambda: None, longest_gap_s=10).joules is None


def test_counters_wrap_each_by_itself(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    tally = Counters({first: 9_999_999, second: 999_999_999})
    for now, a, b in ((0.0, 9_000_000, 1), (1.0, 2_000_000, 5_000_001), (2.0, 3_000_000, 6_000_001)):
        first.write_text(f"{a}\n")
        second.write_text(f"{b}\n")
        tally.take(now)
    assert tally.joules == pytest.approx(3 + 5 + 1 + 1)
    second.write_text("0")  # as after a suspend: it looks like a wrap of nearly 1 kJ, but 1 kW no board draws
    tally = Counters({second: 9_999_999_999})
    second.write_text("5000000000")
    tally.take(0.0)
    second.write_text("7")
    tally.take(1.0)
    assert tally.joules is None


def test_a_counter_that_disappears(tmp_path):
    path = tmp_path / "energy_uj"
    path.write_text("1")
    tally = Counters({path: 1000.0})
    tally.take(0.0)
    path.unlink()
    tally.take(1.0)
    assert tally.joules is None


def test_rapl_takes_packages_and_memory_or_the_platform_alone(tmp_path):
    root = boards.n100().build(tmp_path)
    counters, covers = rapl_counters(root)
    assert ({path.parent.name for path in counters}, covers) == (
        {"intel-rapl:0", "intel-rapl:0:1"},
        "processor",
    )
    boards.FakeBoard(boards.rapl("1", "psys", 9)).build(root)
    counters, covers = rapl_counters(root)
    assert ({path.parent.name for path in counters}, covers) == ({"intel-rapl:1"}, "board")


def test_the_meter_takes_the_first_sensor_that_answers(tmp_path):
    board, clock = boards.jetson_nano(), Clock()
    root = board.build(tmp_path)
    meter = EnergyMeter(root, board.run, clock=clock)
    assert meter.stop() is None
    meter.start()
    clock.now += 2.0
    (root / "sys/bus/i2c/drivers/ina3221x/6-0040/iio:device0/in_power0_input").write_text("4350")
    assert meter.stop() == pytest.approx(2 * (2.35 + 4.35) / 2)
    assert (meter.sensor, meter.covers) == ("ina3221", "board")
    assert meter.stop() is None


def test_the_meter_counts_a_processor_and_says_so(tmp_path):
    board, clock = boards.n100(), Clock()
    root = board.build(tmp_path)
    meter = EnergyMeter(root, board.run, clock=clock)
    meter.start()
    clock.now += 1.0
    (root / "sys/class/powercap/intel-rapl:0/energy_uj").write_text("5000500")
    assert meter.stop() == 5
    assert (meter.sensor, meter.covers) == ("rapl", "processor")


def test_without_a_sensor_energy_is_unknown(tmp_path):
    meter = EnergyMeter(boards.pi_zero().build(tmp_path), no_commands)
    meter.start()
    assert (meter.sensor, meter.covers, meter.stop()) == (None, None, None)


# Heat


@pytest.mark.parametrize(
    ("kind", "told", "wanted"),
    [
        ("battery", "30000", 30),
        ("tsens", "41", None),  # in whole degrees
        ("PMIC-Die", "50000", None),
        ("cpu", "999000", None),
        ("outdoors", "-12500", -12.5),
    ],
)
def test_zones_of_another_unit_or_without_meaning_are_left_out(tmp_path, kind, told, wanted):
    zone = "sys/class/thermal/thermal_zone0"
    root = boards.FakeBoard({f"{zone}/type": kind, f"{zone}/temp": told}).build(tmp_path)
    assert temperature.celsius(root) == wanted


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        ("throttled=0x0", False),
        ("throttled=0x50000", False),  # since boot, not now
        ("throttled=0x1", True),
        ("throttled=0xe0008", True),
        ('error=1 error_msg="Command not registered"', None),
        ("throttled=-1", None),
        (None, None),
    ],
)
def test_throttling_by_the_firmwares_word(tmp_path, told, wanted):
    assert (
        temperature.throttled(
            tmp_path, lambda words: told if words == ["vcgencmd", "get_throttled"] else None
        )
        is wanted
    )


def test_a_processor_that_the_kernel_cools_is_throttled(tmp_path):
    root = boards.jetson_nano().build(tmp_path)
    (root / "sys/class/thermal/cooling_device1/cur_state").write_text("3")
    assert temperature.throttled(root, no_commands) is True


def test_a_processor_that_throttles_itself_between_two_looks(tmp_path):
    board = boards.n100()
    root = board.build(tmp_path)
    sensors = BoardSensors(root, board.run, clock=Clock())
    assert [sensors.read().throttled, sensors.read().throttled] == [False, False]
    (root / "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count").write_text("4")
    assert [sensors.read().throttled, sensors.read().throttled] == [True, False]


# Network

BUS = (
    "busctl get-property org.freedesktop.NetworkManager /org/freedesktop/NetworkManager"
    " org.freedesktop.NetworkManager Metered"
)
NMCLI = "nmcli -t -f GENERAL.METERED device show wwan0"


@pytest.mark.parametrize(
    ("answers", "wanted"),
    [
        ({BUS: "u 1"}, True),
        ({BUS: "u 2"}, False),
        ({BUS: "u 3"}, True),
        ({BUS: "u 4"}, False),
        ({BUS: "u 0", NMCLI: "GENERAL.METERED:no (guessed)"}, False),
        ({NMCLI: "GENERAL.METERED:yes"}, True),
        ({NMCLI: "GENERAL.METERED:unknown"}, True),  # then the interface's name decides
        ({BUS: "Call failed", NMCLI: "Error: NetworkManager is not running."}, True),
    ],
)
def test_metered_by_networkmanager_before_the_interfaces_name(tmp_path, answers, wanted):
    root = boards.pi_4_hot_on_a_modem().build(tmp_path)
    assert metered_network.default_interface(root) == "wwan0"
    assert metered_network.metered(root, lambda words: answers.get(" ".join(words))) is wanted


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        ('{"ip": "192.168.1.42", "supplicant_state": "COMPLETED"}', False),
        ('{"ip": "0.0.0.0", "supplicant_state": "COMPLETED"}', True),
        ('{"API_ERROR": "location is off"}', None),
        ("", None),
    ],
)
def test_metered_on_android(tmp_path, told, wanted):
    assert (
        metered_network.metered(
            tmp_path, lambda words: told if words == ["termux-wifi-connectioninfo"] else None
        )
        is wanted
    )


# Processor


def test_the_cores_of_arm_by_name(tmp_path):
    parts = "".join(f"CPU part\t: {part}\n\n" for part in ("0xd05", "0xd41", "0xd41", "0xfff"))
    info = f"model name\t: ARMv8 Processor rev 3 (v8l)\n{parts}"
    root = boards.FakeBoard({"proc/cpuinfo": info, "sys/devices/system/cpu/online": "0-1,4,6-7\n"}).build(
        tmp_path
    )
    assert board_identity.processor(root) == "Cortex-A55 + Cortex-A78 + ARM part 0xfff"
    assert board_identity.num_cores(root) == 5


def test_a_phone_with_much_memory_is_a_better_one(tmp_path):
    board = boards.phone()
    board.files |= boards.memory(7500, 3000)
    assert board_identity.board_name(board.build(tmp_path), board.run) == "phone-mid"


# Commands


def test_commands_that_fail_hang_or_are_not_there(monkeypatch):
    monkeypatch.setattr(files_and_commands, "COMMAND_S", 0.2)
    assert run_command(["echo", "hello"]) == "hello\n"
    assert run_command(["false"]) is None
    assert run_command(["no-such-command-anywhere"]) is None
    assert run_command(["sleep", "60"]) is None


def test_a_command_runs_once_a_minute_and_one_that_fails_every_ten(tmp_path):
    board, clock = boards.pi_5(), Clock()
    board.build(tmp_path)
    sensors = BoardSensors(tmp_path, board.run, clock=clock)
    first = sensors.read()
    once = len(board.asked)
    assert len(set(board.asked)) == once
    board.commands["vcgencmd get_throttled"] = "throttled=0x4"
    clock.now += 59
    assert sensors.read() == first
    assert len(board.asked) == once
    clock.now += 2
    assert sensors.read().throttled is True
    again = board.asked[once:]
    assert sorted(again) == sorted(board.commands)  # those that answered; the others are left alone
    clock.now += 600
    sensors.read()
    assert board.asked[once + len(again) :] == board.asked[:once]


def test_answers_of_different_commands_are_kept_apart():
    asked = CachedCommands(lambda words: words[0], Clock())
    assert [asked(["a"]), asked(["b"]), asked(["a"])] == ["a", "b", "a"]
