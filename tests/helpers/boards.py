"""Simulated boards for readers that take a root folder: trees of files and answers of commands."""

from dataclasses import dataclass, field
from pathlib import Path

from fleetune.firmware_profiles.schema import ESTIMATE, stated

MIB = 2**20

PMIC = """ 3V7_WL_SW_A current(0)=0.10000000A
   3V3_SYS_A current(1)=0.50000000A
  VDD_CORE_A current(7)=4.00000000A
 3V7_WL_SW_V volt(8)=3.70000000V
   3V3_SYS_V volt(9)=3.30000000V
  VDD_CORE_V volt(15)=0.80000000V
     EXT5V_V volt(24)=5.12000000V
      BATT_V volt(25)=0.00000000V
"""

STATUS = """Name:\tpython
VmPeak:\t 2000000 kB
VmSize:\t 1900000 kB
VmHWM:\t  420000 kB
VmRSS:\t  400000 kB
RssAnon:\t  300000 kB
RssFile:\t   90000 kB
RssShmem:\t   10000 kB
VmData:\t  800000 kB
"""


@dataclass
class FakeBoard:
    """A board with files by path below its root, and answers by command line; other commands are not
    installed.
    """

    files: dict[str, str] = field(default_factory=dict)
    commands: dict[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def build(self, root: Path) -> Path:
        for path, content in self.files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(content)
        return root

    def run(self, words):
        self.asked.append(" ".join(words))
        return self.commands.get(" ".join(words))


def estimates(board):
    """Keys of a board's profile whose values are estimates."""
    return {key for key, figure in stated(board.profile.figures).items() if figure.source == ESTIMATE}


def no_commands(_):
    """A runner of external commands on a board that has none."""


def memory(total_mib, available_mib):
    return {
        "proc/meminfo": f"MemTotal: {total_mib * 1024} kB\nMemAvailable: {available_mib * 1024} kB\n",
        "proc/self/status": STATUS,
    }


def zones(**celsius):
    return {
        f"sys/class/thermal/thermal_zone{n}/{name}": content
        for n, (kind, degrees) in enumerate(celsius.items())
        for name, content in (("type", kind.replace("_", "-")), ("temp", f"{int(degrees * 1000)}\n"))
    }


def supply(name, **values):
    return {f"sys/class/power_supply/{name}/{key}": f"{value}\n" for key, value in values.items()}


def iio_rails(bus, **milliwatts):
    folder = f"sys/bus/i2c/drivers/ina3221x/{bus}/iio:device0"
    names = {f"{folder}/rail_name_{n}": rail for n, rail in enumerate(milliwatts)}
    return names | {
        f"{folder}/in_power{n}_input": f"{value}\n" for n, value in enumerate(milliwatts.values())
    }


def hwmon_rails(address, **volts_and_milliamperes):
    folder = f"sys/bus/i2c/drivers/ina3221/1-{address}/hwmon/hwmon1"
    rails = {}
    for n, (rail, (volts, milliamperes)) in enumerate(volts_and_milliamperes.items(), 1):
        rails |= {
            f"{folder}/in{n}_label": rail,
            f"{folder}/in{n}_input": f"{round(volts * 1000)}\n",
            f"{folder}/curr{n}_input": f"{milliamperes}\n",
        }
    return rails | {f"{folder}/in7_label": "sum of shunt voltages", f"{folder}/in7_input": "999\n"}


def rapl(domain, name, microjoules, wraps_at=1_000_000_000):
    folder = f"sys/class/powercap/intel-rapl:{domain}"
    values = {"name": name, "energy_uj": microjoules, "max_energy_range_uj": wraps_at}
    return {f"{folder}/{key}": f"{value}\n" for key, value in values.items()}


def tree(model):
    return {"proc/device-tree/model": f"{model}\0"}


def pi_5():
    return FakeBoard(
        tree("Raspberry Pi 5 Model B Rev 1.0")
        | memory(8000, 6000)
        | zones(cpu_thermal=48.2)
        | {"sys/devices/system/cpu/online": "0-3\n"},
        {
            "vcgencmd pmic_read_adc": PMIC,
            "vcgencmd get_throttled": "throttled=0x50000\n",
            "busctl get-property org.freedesktop.NetworkManager /org/freedesktop/NetworkManager"
            " org.freedesktop.NetworkManager Metered": "u 4\n",
        },
    )


def pi_4_hot_on_a_modem():
    route = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n"
    route += "eth0\t00000000\t0102A8C0\t0003\t0\t0\t700\t00000000\n"
    route += "wwan0\t00000000\t00000000\t0001\t0\t0\t50\t00000000\nwwan0\t0000000A\t0\t1\t0\t0\t5\t000000FF\n"
    return FakeBoard(
        tree("Raspberry Pi 4 Model B Rev 1.4")
        | memory(4000, 3000)
        | zones(cpu_thermal=81.5)
        | {"sys/devices/platform/soc/soc:firmware/get_throttled": "f0004\n", "proc/net/route": route}
    )


def pi_zero():
    return FakeBoard(tree("Raspberry Pi Zero 2 W Rev 1.0") | memory(512, 300) | zones(cpu_thermal=40))


def jetson_nano():
    return FakeBoard(
        tree("NVIDIA Jetson Nano Developer Kit")
        | memory(4000, 3000)
        | iio_rails("6-0040", POM_5V_IN=2350, POM_5V_GPU=40, POM_5V_CPU=580)
        | zones(AO_therm=41.0, CPU_therm=36.5, PMIC_Die=100)
        | {
            "sys/class/thermal/cooling_device0/type": "pwm-fan",
            "sys/class/thermal/cooling_device0/cur_state": "2",
            "sys/class/thermal/cooling_device1/type": "thermal-cpufreq-0",
            "sys/class/thermal/cooling_device1/cur_state": "0",
        }
    )


def jetson_orin_nano():
    return FakeBoard(
        tree("NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super")
        | memory(8000, 5000)
        | hwmon_rails("0040", VDD_IN=(5.0, 1200), VDD_CPU_GPU_CV=(5.0, 300), VDD_SOC=(5.0, 250))
        | zones(cpu_thermal=47.5, tj_thermal=50.25)
    )


def jetson_agx_orin():
    return FakeBoard(
        tree("NVIDIA Jetson AGX Orin Developer Kit")
        | hwmon_rails("0040", VDD_GPU_SOC=(20.0, 200), VDD_CPU_CV=(20.0, 50), VIN_SYS_5V0=(5.0, 800))
        | hwmon_rails("0041", NC=(0.0, 0), VDDQ_VDD2_1V8AO=(5.0, 100))
    )


def jetson_thor():
    hwmon = "sys/class/hwmon/hwmon2"
    return FakeBoard(
        tree("NVIDIA Jetson AGX Thor Developer Kit")
        | hwmon_rails("0040", VDD_GPU=(12.0, 900), VDD_CPU_SOC_MSS=(12.0, 600))
        | {
            f"{hwmon}/name": "ina238\n",
            f"{hwmon}/power1_input": "27500000\n",
            "sys/class/hwmon/hwmon1/name": "nvme",
        }
    )


def coral():
    return FakeBoard(tree("Freescale i.MX8MQ Phanbell") | memory(1000, 700) | zones(cpu_thermal=55))


def n100():
    info = "processor\t: 0\nmodel name\t: Intel(R) N100\n\nprocessor\t: 1\nmodel name\t: Intel(R) N100\n"
    throttle = "sys/devices/system/cpu/cpu0/thermal_throttle"
    return FakeBoard(
        {
            "proc/cpuinfo": info,
            "sys/class/dmi/id/product_name": "Default string\n",
            "sys/class/thermal/cooling_device0/type": "Processor",
            "sys/class/thermal/cooling_device0/cur_state": "0",
            f"{throttle}/core_throttle_count": "3\n",
            f"{throttle}/package_throttle_count": "4\n",
        }
        | memory(16000, 12000)
        | zones(x86_pkg_temp=52, acpitz=27.8)
        | rapl("0", "package-0", 500)
        | rapl("0:0", "core", 300)
        | rapl("0:1", "dram", 100)
        | supply("ADP1", type="Mains", online=1)
    )


def laptop():
    return FakeBoard(
        memory(16000, 12000)
        | supply("AC", type="Mains", online=0)
        | supply(
            "BAT0", type="Battery", present=1, status="Discharging", energy_now=20_000_000,
            energy_full=40_000_000, power_now=12_500_000, capacity=50, temp=314,
        )
        | supply(
            "BAT1", type="Battery", present=1, status="Unknown", energy_now=10_000_000,
            energy_full=10_000_000, power_now=0, capacity=100,
        )
        | supply("hidpp_battery_0", type="Battery", scope="Device", status="Discharging", capacity=5)
    )  # fmt: skip


def phone():
    """Android 13 in Termux, where programs cannot read the kernel's files on power and temperature."""
    return FakeBoard(
        memory(3700, 1500) | {"system/build.prop": "", "sys/devices/system/cpu/online": "0-7"},
        {
            "getprop ro.product.model": "SM-A235F\n",
            "termux-battery-status": '{"health": "GOOD", "percentage": 72, "plugged": "UNPLUGGED", "status":'
            ' "DISCHARGING", "temperature": "28.5", "current": -423000, "voltage": 3900}',
            "termux-wifi-connectioninfo": '{"ip": "0.0.0.0", "supplicant_state": "DISCONNECTED"}',
        },
    )


ALL = (
    pi_5, pi_4_hot_on_a_modem, pi_zero, jetson_nano, jetson_orin_nano, jetson_agx_orin, jetson_thor, coral,
    n100, laptop, phone,
)  # fmt: skip
