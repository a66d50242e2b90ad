"""Pictures of a program's screens: run it in a terminal of its own, and draw its frames as one animated
SVG.
"""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

# the codes with which rich's Live moves back
_REDRAWN = re.compile(r"\r?(?:\x1b\[\?25[lh])?\r?\x1b\[2K(?:\x1b\[1A\x1b\[2K)*")
# rich's SVG loads fonts from the network, which we remove
_FONT_FACE = re.compile(r"@font-face \{.*?\}", re.DOTALL)
_SVG = re.compile(
    r"<svg[^>]*viewBox=\"0 0 (?P<width>[\d.]+) (?P<height>[\d.]+)\"[^>]*>(?P<inner>.*)</svg>", re.DOTALL
)


def recorded(command: Sequence[str], folder: Path, columns: int, lines: int) -> str:
    """Return a program's output on a terminal of this size. Raises CalledProcessError if it fails."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    environment = {**os.environ, "COLUMNS": str(columns), "LINES": str(lines), "TERM": "xterm-256color"}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    parts = []
    with suppress(OSError):  # Linux reports in this way that no process has the other end open
        while part := os.read(ours, 65_536):
            parts.append(part)
    os.close(ours)
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, command)
    return b"".join(parts).decode().replace("\r\n", "\n")


def frames(output: str, title: str) -> list[str]:
    """Return the different states of a live view whose first line begins with `title`, colours included."""
    found, seen = [], ""
    for part in _REDRAWN.split(output):
        words = Text.from_ansi(part).plain.rstrip()
        if words.startswith(title) and words != seen:
            found.append(part)
            seen = words
    return found


def spread(items: Sequence[str], count: int) -> list[str]:
    """At most `count` items at even distances, always with the first and the last."""
    if len(items) <= count:
        return list(items)
    return [items[round(place * (len(items) - 1) / (count - 1))] for place in range(count)]


def animated(screens: Sequence[str], columns: int, lines: int, title: str, seconds: float) -> str:
    """One SVG that shows the screens in turn, each for `seconds`, the last for three times as long."""
    name = re.sub(r"\W+", "-", title)
    total = seconds * (len(screens) + 2)
    shares = [seconds * place / total * 100 for place in range(len(screens))] + [100.0]
    drawings, styles = [], []
    for place, screen in enumerate(screens):
        width, height, inner = _drawn(screen, columns, lines, title, f"{name}-{place}")
        begin, end = shares[place], shares[place + 1]
        shown = "" if not place else f"0%,{begin - 0.001:.3f}%{{opacity:0}}"
        hidden = "" if end == 100 else f"{end:.3f}%,100%{{opacity:0}}"
        styles.append(
            f"@keyframes {name}-{place}{{{shown}{begin:.3f}%,{end - 0.001:.3f}%{{opacity:1}}{hidden}}}"
            f".{name}-{place}{{animation:{name}-{place} {total:g}s step-end infinite}}"
        )
        drawings.append(f'<g class="{name}-{place}">{inner}</g>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">'
    return f"{head}<style>{''.join(styles)}</style>{''.join(drawings)}</svg>\n"


def _drawn(screen: str, columns: int, lines: int, title: str, unique: str) -> tuple[str, str, str]:
    """Width, height and content of one screen's SVG."""
    rows = Text.from_ansi(screen).split("\n", allow_blank=True)[:lines]
    text = Text("\n").join([*rows, *[Text()] * (lines - len(rows))])
    console = Console(record=True, width=columns, height=lines, file=io.StringIO(), legacy_windows=False)
    console.print(text, overflow="crop", no_wrap=True)
    svg = console.export_svg(title=title, theme=DIMMED_MONOKAI, unique_id=unique)
    found = _SVG.search(_FONT_FACE.sub("", svg))
    assert found is not None, "rich draws SVGs otherwise than it did"
    return found["width"], found["height"], found["inner"]
