"""Log-mel features of a sound: what a model sees of it, in numpy alone, so that a device needs nothing else.

Frames under a Hann window, the power of their discrete Fourier transform, summed under triangles that are
spaced evenly on the mel scale of O'Shaughnessy (1987), 2595 log10(1 + f / 700), and the logarithm of it. The
numbers are those of librosa's `melspectrogram` and torchaudio's `MelSpectrogram` with `center=False`, `htk`
and `norm=None`, to rounding.
"""

import math
from functools import cache
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct, ValidationError, convert
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from fleetune.edge_agent.datasets.source_options import source_options
from fleetune.protocols.errors import DataError

FLOOR = 1e-6  # added to every energy: silence has a logarithm, too
Sound = NDArray[np.float32]


class LogMel(Struct, frozen=True, forbid_unknown_fields=True):
    """How sounds become features. All devices of a fleet must use the same.

    Attributes:
        rate: samples of sound a second, Hz; sounds of another rate are refused.
        seconds: of a sound that count: a shorter one is filled up with silence, a longer one cut.
        mels: bands on the mel scale, from 0 Hz to half the rate.
        frame_ms: length of a frame.
        hop_ms: from the beginning of a frame to that of the next.
    """

    rate: Annotated[int, Meta(ge=100, le=768_000)] = 16_000
    seconds: Annotated[float, Meta(gt=0, le=600)] = 1.0
    mels: Annotated[int, Meta(ge=1, le=1024)] = 40
    frame_ms: Annotated[float, Meta(gt=0, le=10_000)] = 32.0
    hop_ms: Annotated[float, Meta(gt=0, le=10_000)] = 16.0

    @property
    def frame(self) -> int:
        """Samples of a frame."""
        return round(self.rate * self.frame_ms / 1000)

    @property
    def hop(self) -> int:
        """Samples from frame to frame."""
        return round(self.rate * self.hop_ms / 1000)

    @property
    def length(self) -> int:
        """Samples of a sound."""
        return round(self.rate * self.seconds)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of a sound's features: one channel, bands from low to high, frames in time."""
        return 1, self.mels, 1 + (self.length - self.frame) // self.hop


def log_mel_options(source: str, options: str) -> tuple[LogMel, dict[str, str]]:
    """Settings out of `key=value` with `&` between, as they stand behind a source's question mark; and what
    else stands there.

    Raises:
        DataError: an option is given twice, a value is out of range, there is no frame, or a band lies
            between two lines of the spectrum.
    """
    given = source_options(source, options)
    try:
        mine = {name: given.pop(name) for name in LogMel.__struct_fields__ if name in given}
        found = convert(mine, LogMel, strict=False)
    except ValidationError as problem:
        known = ", ".join(LogMel.__struct_fields__)
        raise DataError(f"{source}: {problem}; options are {known}, as in ?rate=8000&mels=40") from None
    if not 2 <= found.frame <= found.length or not found.hop:
        raise DataError(
            f"{source}: frames of {found.frame} samples every {found.hop} in sounds of {found.length};"
            " give a longer frame_ms, hop_ms or seconds"
        )
    empty = int((bands(found).sum(0) == 0).sum())
    if empty:
        words = f"{empty} of {found.mels} bands lie between two lines of the spectrum"
        raise DataError(f"{source}: {words}; fewer mels, or a longer frame_ms")
    return found, given


def log_mel(sound: Sound, settings: LogMel) -> NDArray[np.float32]:
    """The features of one sound.

    Args:
        sound: amplitudes in [-1, 1], one channel, any length, shape (n,).
        settings: its rate among them.

    Returns:
        Natural logarithms of band energies, of the shape `settings.shape`.
    """
    whole = np.zeros(settings.length, np.float32)
    kept = sound[: settings.length]
    whole[: kept.size] = kept
    frames = sliding_window_view(whole, settings.frame)[:: settings.hop]
    power = np.abs(np.fft.rfft(frames * _window(settings.frame), axis=1)) ** 2
    return np.log(power @ bands(settings) + FLOOR).T[None].astype(np.float32)


@cache
def bands(settings: LogMel) -> NDArray[np.float64]:
    """What each line of the spectrum counts in each band, shape (frame // 2 + 1, mels).

    A band rises from the middle of the one below it to 1 at its own, and falls to 0 at the next one's.
    """
    lines = np.fft.rfftfreq(settings.frame, 1 / settings.rate)
    top = 2595 * math.log10(1 + settings.rate / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, settings.mels + 2) / 2595) - 1)
    up = (lines[:, None] - edges[:-2]) / np.diff(edges)[:-1]
    down = (edges[2:] - lines[:, None]) / np.diff(edges)[1:]
    return np.maximum(0, np.minimum(up, down))


@cache
def _window(frame: int) -> NDArray[np.float64]:
    """Hann's, periodic."""
    found: NDArray[np.float64] = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(frame) / frame)
    return found
