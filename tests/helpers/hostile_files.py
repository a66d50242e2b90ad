"""Small files that need huge memory or disk when read, as a watched folder may receive them."""

import os
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np


def write_fifo(path: Path) -> None:
    os.mkfifo(path)


def write_endless_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def write_npz_bomb(path: Path, num_bytes: int = 2**29) -> None:
    """Write a small file that unpacks to `num_bytes`."""
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("x.npy", "w", force_zip64=True) as file,
    ):
        rows = num_bytes // 2**20
        np.lib.format.write_array_header_1_0(
            file, {"descr": "|u1", "fortran_order": False, "shape": (rows, 2**20)}
        )
        for _ in range(rows):
            file.write(bytes(2**20))


def write_lying_npz(path: Path) -> None:
    """Write a header that announces 8 TB, followed by 100 bytes."""
    with zipfile.ZipFile(path, "w") as archive, archive.open("x.npy", "w") as file:
        header = {"descr": "<f8", "fortran_order": False, "shape": (2**20, 2**20)}
        np.lib.format.write_array_header_1_0(file, header)
        file.write(bytes(100))


def write_long_header_npz(path: Path, num_bytes: int = 2**26) -> None:
    """Write a small file whose array has a header of `num_bytes` spaces, in version 2.0 of the format."""
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("x.npy", "w", force_zip64=True) as file,
    ):
        file.write(b"\x93NUMPY\x02\x00" + struct.pack("<I", num_bytes))
        for _ in range(num_bytes // 2**20):
            file.write(b" " * 2**20)


def write_sparse_wav(path: Path, num_bytes: int = 3_700_000_000) -> None:
    """Write a header, followed by a hole in the file."""
    head = struct.pack(
        "<4sI4s4sIHHIIHH", b"RIFF", num_bytes + 36, b"WAVE", b"fmt ", 16, 1, 1, 16_000, 32_000, 2, 16
    )
    with path.open("wb") as file:
        file.write(head + struct.pack("<4sI", b"data", num_bytes))
        file.truncate(num_bytes + 44)


def write_eps(path: Path) -> None:
    """Write a PostScript program that writes a file when it is executed."""
    text = "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n%%EndComments\nshowpage\n%%EOF\n"
    path.write_text(text)


def write_huge_image(path: Path) -> None:
    """Write a PNG of a few bytes that announces 65,000 x 65,000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 65_000, 65_000, 8, 2, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(10**6)))
        + chunk(b"IEND", b"")
    )


def write_huge_classes(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10**10)


def write_wide_table(path: Path) -> None:
    path.write_bytes(b"," * 10**6 + b"\n1\n")
