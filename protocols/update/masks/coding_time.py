"""What the code of a mask takes of a device: behind a quick link a small board has the bitmap sooner."""

from dataclasses import dataclass

# Operations of training for each flag that is coded: ONNX Runtime trains LeNet-5 at 19 GFLOPS where 2.2 to
# 3.3 million flags a second are written or read (one core). A board is taken to
# be as much slower at the one as at the other.
FLOPS_PER_FLAG = 7_000


@dataclass(frozen=True)
class CodingTime:
    """How long flags and bytes take.

    Attributes:
        flags_per_s: of a mask, that the device writes or reads.
        bytes_per_s: of its link, in the mask's direction.
    """

    flags_per_s: float
    bytes_per_s: float

    def pays(self, num_flags: int, plain_bytes: int, even_bytes: int) -> bool:
        """Whether the bytes that a code saves take longer than coding.

        Compression finds what repeats itself, and prediction the rest: a bitmap that shrank to a share of
        `even_bytes` is taken to lose that share of its bytes by a code. It was 0.9 of SRP-pFed's masks, which
        do not shrink, 0.38 of FedCAC's, at 0.47, and 0.26 of FedPURIN's, at 0.23 (docs/wire.md, Masks).

        Args:
            num_flags: of the mask.
            plain_bytes: of its bitmap, compressed.
            even_bytes: of as many flags that were all equally likely.
        """
        saved = plain_bytes * min(1.0, plain_bytes / max(1, even_bytes))
        # Multiplied: a device may say that it trains one sample in 1e300 years.
        return saved * self.flags_per_s > num_flags * self.bytes_per_s


def coding_time(samples_per_s: float | None, flops_per_sample: float, bps: float | None) -> CodingTime | None:
    """Of a device that trains so quickly; None: it is not known.

    Args:
        samples_per_s: full training steps.
        flops_per_sample: of such a step.
        bps: of its link, bits a second.
    """
    if not samples_per_s or not flops_per_sample or not bps:
        return None
    return CodingTime(samples_per_s * flops_per_sample / FLOPS_PER_FLAG, bps / 8)
