"""Sounds as log-mel features: against scipy and sums by hand; every kind of file, and mistakes."""

import math
import struct
import wave

import numpy as np
import pytest
from scipy.signal import ShortTimeFFT
from scipy.signal.windows import hann
from tests.helpers.errors import raises

from fleetune.edge_agent.datasets.audio import read_sound
from fleetune.edge_agent.datasets.log_mel import FLOOR, LogMel, bands, log_mel, log_mel_options
from fleetune.edge_agent.datasets.sources import load
from fleetune.protocols.errors import DataError

SETTINGS = LogMel(rate=8000, seconds=0.2, mels=8)


def tone(hertz=440.0, samples=1600, rate=8000, size=0.5):
    return (size * np.sin(2 * np.pi * hertz * np.arange(samples) / rate)).astype(np.float32)


def write(path, sound, rate=8000, width=2, channels=1):
    """A WAV file of whole numbers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    top = 2 ** (8 * width - 1)
    numbers = np.clip(np.round(np.asarray(sound, np.float64) * top), -top, top - 1).astype(np.int64)
    data = (numbers + 128).astype(np.uint8) if width == 1 else numbers.astype("<i8").reshape(-1, 1)
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", ""))
        file.writeframes(data.tobytes() if width == 1 else data.view(np.uint8)[:, :width].tobytes())
    return path


def test_features_are_those_of_scipys_transform_under_triangles_by_hand():
    sound = np.random.default_rng(0).normal(size=1700).astype(np.float32) / 4
    frame, hop = 256, 128
    transform = ShortTimeFFT(hann(frame, sym=False), hop, 8000)
    spectrum = transform.stft(sound[:1600].astype(np.float64), p0=1, p1=12, k_offset=0)
    power = np.abs(spectrum) ** 2  # slice p is centred on p * hop: slice 1 is the first whole frame
    mel = [2595 * math.log10(1 + 4000 / 700) * band / 9 for band in range(10)]
    hertz = [700 * (10 ** (one / 2595) - 1) for one in mel]
    wanted = np.zeros((8, power.shape[1]))
    for band, (low, middle, high) in enumerate(zip(hertz, hertz[1:], hertz[2:], strict=False)):
        for line in range(frame // 2 + 1):
            at = line * 8000 / frame
            if low < at <= middle:
                wanted[band] += (at - low) / (middle - low) * power[line]
            elif middle < at < high:
                wanted[band] += (high - at) / (high - middle) * power[line]
    found = log_mel(sound, SETTINGS)
    assert found.shape == SETTINGS.shape == (1, 8, 11)
    np.testing.assert_allclose(found[0], np.log(wanted + FLOOR), rtol=1e-5)


@pytest.mark.parametrize("name", ["no/b.flac", "no/b.OGG", "no/b.mp3"])
def test_a_sound_that_is_no_wav_file_is_refused_with_the_command_that_converts_it(tmp_path, name):
    write(tmp_path / "1" / "a.wav", tone())
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_bytes(b"sound")
    command = "ffmpeg -i FILE -ar 8000 -c:a pcm_s16le FILE.wav"
    with raises(DataError, str(tmp_path / name), remedy=command):
        load(f"audio:{tmp_path}?rate=8000")


def test_one_frame_against_a_sum_by_hand():
    settings = LogMel(rate=100, seconds=0.08, mels=2, frame_ms=80, hop_ms=80)
    sound = tone(20, 8, 100)
    weights = [0.5 - 0.5 * math.cos(2 * math.pi * at / 8) for at in range(8)]
    power = []
    for line in range(5):
        turns = [2 * math.pi * line * at / 8 for at in range(8)]
        parts = [float(one) * weight for one, weight in zip(sound, weights, strict=True)]
        real = sum(part * math.cos(turn) for part, turn in zip(parts, turns, strict=True))
        imaginary = sum(part * math.sin(turn) for part, turn in zip(parts, turns, strict=True))
        power.append(real**2 + imaginary**2)
    wanted = [
        math.log(sum(map(math.prod, zip(power, band, strict=True))) + 1e-6) for band in bands(settings).T
    ]
    np.testing.assert_allclose(log_mel(sound, settings)[0, :, 0], wanted, rtol=1e-5)


def test_short_sounds_are_filled_with_silence_and_long_ones_cut():
    short, whole = tone(samples=700), np.zeros(1600, np.float32)
    whole[:700] = short
    np.testing.assert_array_equal(log_mel(short, SETTINGS), log_mel(whole, SETTINGS))
    long = tone(samples=5000)
    np.testing.assert_array_equal(log_mel(long, SETTINGS), log_mel(long[:1600], SETTINGS))
    assert log_mel(short, SETTINGS)[0, 0, -1] == pytest.approx(math.log(FLOOR))


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_wav_files_of_every_width(tmp_path, width):
    sound = tone()
    found = read_sound(write(tmp_path / "a.wav", sound, width=width), 8000)
    np.testing.assert_allclose(found, sound, atol=max(2.0 ** (1 - 8 * width), 1e-7))
    assert found.dtype == np.float32


def test_channels_are_averaged(tmp_path):
    left, right = tone(), tone(880)
    path = write(tmp_path / "a.wav", np.stack([left, right], 1).reshape(-1), channels=2)
    np.testing.assert_allclose(read_sound(path, 8000), (left + right) / 2, atol=1e-4)


def test_class_folders(tmp_path):
    write(tmp_path / "yes" / "b.wav", tone(300))
    write(tmp_path / "no" / "a.WAV", tone(600))
    write(tmp_path / "7" / "deeper" / "c.wav", tone(900))
    (tmp_path / "classes.txt").write_text("no\nyes\n")
    found = load(f"audio:{tmp_path}?rate=8000&seconds=0.2&mels=8")
    assert found.y.tolist() == [7, 0, 1]
    assert (found.x.shape, found.x.dtype) == ((3, 1, 8, 11), np.float32)
    np.testing.assert_array_equal(found.x[2], log_mel(read_sound(tmp_path / "yes" / "b.wav", 8000), SETTINGS))


def test_names_of_files_tell_class_and_speaker(tmp_path):
    for name in ("3_theo_0", "0_jackson_12", "3_jackson_1"):
        write(tmp_path / f"{name}.wav", tone())
    found = load(
        "audio:recordings?rate=8000&names=label,group,take",
        tmp_path.rename(tmp_path.parent / "recordings").parent,
    )
    assert found.y.tolist() == [0, 3, 3]
    assert found.group.tolist() == ["jackson", "jackson", "theo"]


def test_mistakes_are_one_line(tmp_path):
    path = write(tmp_path / "cat" / "a.wav", tone())
    cases = {
        "rate=fast": ["$.rate"],
        "rate=8000&frame=3": ["'frame'"],
        "rate=8000&frame_ms=2000": ["16000", "128", "8000", "frame_ms"],
        "rate=8000&hop_ms=0.01": ["hop_ms"],
        "rate=8000&mels=200": ["200", "mels"],
        "": ["a.wav", "16000", "rate=8000"],
        "rate=8000": ["a.wav", "'cat'", "classes.txt"],
        "rate=8000&names=group": ["names", "label"],
        "rate=8000&names=label,take": ["a.wav", "names"],
    }
    for options, line in cases.items():
        with raises(DataError, *line):
            load(f"audio:{tmp_path}?{options}" if options else f"audio:{tmp_path}")
    with raises(DataError, "a.wav"):
        load(f"audio:{path.parent}?rate=8000")
    (tmp_path / "empty").mkdir()
    with raises(DataError, f"{tmp_path}/empty", ".wav"):
        load(f"audio:{tmp_path}/empty")
    write(path, [])
    with raises(DataError, "a.wav"):
        load(f"audio:{tmp_path}?rate=8000")


def test_a_file_of_floats_is_refused_with_the_command_that_converts_it(tmp_path):
    floats = tmp_path / "0" / "a.wav"
    floats.parent.mkdir()
    data = tone().tobytes()
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 3, 1, 8000, 32000, 4, 32)
    head = struct.pack("<4sI4s", b"RIFF", 36 + len(data), b"WAVE")
    floats.write_bytes(head + form + struct.pack("<4sI", b"data", len(data)) + data)
    with raises(DataError, "a.wav", remedy="ffmpeg"):
        load(f"audio:{tmp_path}?rate=8000")


def test_options_that_are_not_of_features_are_handed_back():
    assert log_mel_options("s", "rate=8000&x=1") == (LogMel(rate=8000), {"x": "1"})
