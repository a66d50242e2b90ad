"""A program's screens as one picture: what is recorded, which frames are found, that it stands by itself."""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from fleetune.tools.docs.terminal import animated, frames, recorded, spread

VIEW = """
from rich.console import Console
from rich.live import Live

console = Console()
with Live(console=console, auto_refresh=False, transient=True) as live:
    for step in (1, 2, 2, 3):
        live.update(f"[red]demo[/red] run\\nstep {step} of 3, {console.width} wide", refresh=True)
"""
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals")


def test_the_frames_of_a_live_view_are_found_once_each(tmp_path):
    output = recorded([sys.executable, "-c", VIEW], tmp_path, 42, 10)
    found = [re.sub(r"\x1b\[[0-9;?]*\w", "", frame).strip() for frame in frames(output, "demo")]
    assert found == [f"demo run\nstep {step} of 3, 42 wide" for step in (1, 2, 3)]
    assert frames(output, "other") == []


def test_a_program_that_fails_makes_no_picture():
    with pytest.raises(subprocess.CalledProcessError):
        recorded([sys.executable, "-c", "raise SystemExit(3)"], Path(), 80, 24)


def test_first_and_last_frame_are_always_there():
    assert spread("abcdefg", 3) == ["a", "d", "g"]
    assert spread("ab", 3) == ["a", "b"]


def test_a_picture_is_one_document_that_asks_nobody_for_anything():
    picture = animated(["\x1b[31mone\x1b[0m", "two"], 20, 4, "demo", 0.5)
    ET.fromstring(picture)
    asked = set(re.findall(r"https?://[^\s\"'<]+", picture)) - {"http://www.w3.org/2000/svg"}
    assert asked <= {"https://www.textualize.io"}  # a comment of rich's
    assert "@font-face" not in picture
    assert picture.count("animation:") == 2
    assert "infinite" in picture
