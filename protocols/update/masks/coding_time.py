"""The time that a device needs to code a mask; on a fast link, a small board sends a plain bitmap sooner."""

from dataclasses import dataclass

# Training operations for each coded boolean. ONNX Runtime trains LeNet-5 at 19 GFLOPS on a core that writes
# or reads 2.2 to 3.3 million booleans a second. This assumes that a slower board is slower at both by the
# same factor.
FLOPS_PER_BOOLEAN = 7_000


@dataclass(frozen=True)
class CodingTime:
    """Speed of a device at coding masks, and of its link.

    Attributes:
        booleans_per_s: number of booleans that the device codes or decodes in a second.
        bytes_per_s: rate of the device's link in the mask's direction.
    """

    booleans_per_s: float
    bytes_per_s: float

    def pays(self, num_booleans: int, plain_bytes: int, even_bytes: int) -> bool:
        """True if coding the mask takes less time than sending the bytes that the code saves.

        Compression removes repetition and prediction removes more. The predicted saving is the share
        plain_bytes / `even_bytes` of the bitmap's bytes. Measured savings: 0.9 for SRP-pFed's masks, which do
        not shrink, 0.38 for FedCAC's at a share of 0.47, and 0.26 for FedPURIN's at 0.23 (docs/wire.md,
        Masks).

        Args:
            num_booleans: booleans of the mask.
            plain_bytes: bytes of its bitmap after compression.
            even_bytes: bytes of the same number of booleans, all equally likely.
        """
        saved = plain_bytes * min(1.0, plain_bytes / max(1, even_bytes))
        # Multiply rather than divide: a device may report that one sample takes 1e300 years.
        return saved * self.booleans_per_s > num_booleans * self.bytes_per_s


def coding_time(samples_per_s: float | None, flops_per_sample: float, bps: float | None) -> CodingTime | None:
    """Return the coding time of a device, from its training speed; None if the speed or the link is unknown.

    Args:
        samples_per_s: full training steps a second, in samples.
        flops_per_sample: operations of such a step for one sample.
        bps: speed of its link in bits a second.
    """
    if not samples_per_s or not flops_per_sample or not bps:
        return None
    return CodingTime(samples_per_s * flops_per_sample / FLOPS_PER_BOOLEAN, bps / 8)
