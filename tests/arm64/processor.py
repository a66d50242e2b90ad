"""Which processor programs in an arm64 root are told that they run on.

qemu hands them the files of the host's kernel. Those describe an x86 processor: `onnxruntime` 1.28 and later
crashes on import there, because it finds a second-level cache of a core that it knows nothing about
(https://github.com/pytorch/pytorch/issues/188255). So the root gets files as an arm64 kernel would have them.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Processor:
    """What the kernel tells of each core: the parts of its ID register MIDR_EL1, and its features."""

    implementer: int
    variant: int
    part: int
    revision: int
    features: str = "fp asimd evtstrm crc32 cpuid"

    @property
    def id_register(self) -> int:
        """MIDR_EL1 whole."""
        return self.implementer << 24 | self.variant << 20 | 0xF << 16 | self.part << 4 | self.revision


# By the names of qemu's QEMU_CPU. The numbers are those that qemu 7.2 gives them; the features are those of
# boards: the Pi's A53 and A72 have no AES and SHA instructions, qemu's have.
PROCESSORS = {
    "max": Processor(0x00, 0, 0x051, 0),
    "cortex-a53": Processor(0x41, 0, 0xD03, 4),
    "cortex-a57": Processor(0x41, 1, 0xD07, 0, "fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid"),
    "cortex-a72": Processor(0x41, 0, 0xD08, 3),
    "cortex-a76": Processor(
        0x41,
        4,
        0xD0B,
        1,
        "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp",
    ),
}


def cpuinfo(processor: Processor, num_cores: int) -> str:
    """The text of /proc/cpuinfo."""
    return "".join(
        f"processor\t: {core}\n"
        f"Features\t: {processor.features}\n"
        f"CPU implementer\t: {processor.implementer:#04x}\n"
        "CPU architecture: 8\n"
        f"CPU variant\t: {processor.variant:#x}\n"
        f"CPU part\t: {processor.part:#05x}\n"
        f"CPU revision\t: {processor.revision}\n\n"
        for core in range(num_cores)
    )


def describe_cores(folder: Path, processor: Processor, num_cores: int) -> None:
    """Fill `folder` as /sys/devices/system/cpu, of a board whose caches are not described."""
    for core in range(num_cores):
        registers = folder / f"cpu{core}" / "regs/identification"
        registers.mkdir(parents=True)
        (registers / "midr_el1").write_text(f"{processor.id_register:#018x}\n")
    for name in ("possible", "present", "online"):
        (folder / name).write_text(f"0-{num_cores - 1}\n" if num_cores > 1 else "0\n")
    (folder / "kernel_max").write_text("255\n")
