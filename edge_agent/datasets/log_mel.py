"""Computes log-mel features of a sound for a model, with NumPy alone, so that a device needs nothing else.

The sound is cut into frames under a Hann window. The power of each frame's discrete Fourier transform is
summed under triangles, and the features are the logarithms. The triangles are spaced evenly on the mel scale
of O'Shaughnessy (1987), 2595 log10(1 + f / 700). Up to rounding, the numbers equal those of librosa's
`melspectrogram` and torchaudio's `MelSpectrogram` with `center=False`, `htk` and `norm=None`.
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

FLOOR = 1e-6  # added to every energy, so that silence has a logarithm
Sound = NDArray[np.float32]


class LogMel(Struct, frozen=True, forbid_unknown_fields=True):
    """How sounds become features. All devices of a fleet must use the same settings.

    Attributes:
        rate: sampling rate in Hz. Sounds of another rate are refused.
        seconds: length of a sample in seconds. Shorter sounds are padded with silence, longer ones cut.
        mels: number of bands on the mel scale, from 0 Hz to half the rate.
        frame_ms: length of a frame, in ms.
        hop_ms: time from the start of a frame to the start of the next, in ms.
    """

    rate: Annotated[int, Meta(ge=100, le=768_000)] = 16_000
    seconds: Annotated[float, Meta(gt=0, le=600)] = 1.0
    mels: Annotated[int, Meta(ge=1, le=1024)] = 40
    frame_ms: Annotated[float, Meta(gt=0, le=10_000)] = 32.0
    hop_ms: Annotated[float, Meta(gt=0, le=10_000)] = 16.0

    @property
    def frame(self) -> int:
        """Amplitudes in a frame."""
        return round(self.rate * self.frame_ms / 1000)

    @property
    def hop(self) -> int:
        """Amplitudes from the start of a frame to the start of the next."""
        return round(self.rate * self.hop_ms / 1000)

    @property
    def length(self) -> int:
        """Amplitudes in a sound."""
        return round(self.rate * self.seconds)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of a sound's features: one channel, bands from low to high, frames in order of time."""
        return 1, self.mels, 1 + (self.length - self.frame) // self.hop


def log_mel_options(source: str, options: str) -> tuple[LogMel, dict[str, str]]:
    """Return the settings that a source's options give, and the other options.

    Args:
        source: the source as the user wrote it, for messages.
        options: `key=value` pairs separated by `&`.

    Returns:
        The settings, and all other options.

    Raises:
        DataError: an option is given twice, a value is out of range, or no frame fits. Or a band is so narrow
            that it lies between two lines of the spectrum.
    """
    given = source_options(source, options)
    try:
        mine = {name: given.pop(name) for name in LogMel.__struct_fields__ if name in given}
        found = convert(mine, LogMel, strict=False)
    except ValidationError as problem:
        known = ", ".join(LogMel.__struct_fields__)
        raise DataError(f"{source}: {problem}; the options are {known}, as in ?rate=8000&mels=40") from None
    if not 2 <= found.frame <= found.length or not found.hop:
        raise DataError(
            f"{source}: frames of {found.frame} samples every {found.hop} in sounds of {found.length};"
            " give a longer frame_ms, hop_ms or seconds"
        )
    empty = int((bands(found).sum(0) == 0).sum())
    if empty:
        words = f"{empty} of {found.mels} bands are empty, because they lie between two lines of the spectrum"
        raise DataError(f"{source}: {words}; give fewer mels or a longer frame_ms")
    return found, given


def log_mel(sound: Sound, settings: LogMel) -> NDArray[np.float32]:
    """Compute the features of one sound.

    Args:
        sound: amplitudes in [-1, 1] of one channel at the settings' rate, any length, shape (n,).
        settings: how they become features.

    Returns:
        Natural logarithms of band energies, of shape `settings.shape`.
    """
    whole = np.zeros(settings.length, np.float32)
    cut = sound[: settings.length]
    whole[: cut.size] = cut
    frames = sliding_window_view(whole, settings.frame)[:: settings.hop]
    power = np.abs(np.fft.rfft(frames * _window(settings.frame), axis=1)) ** 2
    return np.log(power @ bands(settings) + FLOOR).T[None].astype(np.float32)


@cache
def bands(settings: LogMel) -> NDArray[np.float64]:
    """Weight of each spectrum line in each band, shape (frame // 2 + 1, mels).

    A band rises from the centre of the band below it to 1 at its own centre. It falls to 0 at the next
    centre.
    """
    lines = np.fft.rfftfreq(settings.frame, 1 / settings.rate)
    top = 2595 * math.log10(1 + settings.rate / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, settings.mels + 2) / 2595) - 1)
    up = (lines[:, None] - edges[:-2]) / np.diff(edges)[:-1]
    down = (edges[2:] - lines[:, None]) / np.diff(edges)[1:]
    return np.maximum(0, np.minimum(up, down))


@cache
def _window(frame: int) -> NDArray[np.float64]:
    """Periodic Hann window."""
    found: NDArray[np.float64] = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(frame) / frame)
    return found
