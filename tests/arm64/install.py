"""The checkout as a wheel, installed in an arm64 root as on a board: a virtual environment, and pip."""

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.arm64.enter import VENV, command

from fleetune.protocols.errors import SettingError

CHECKOUT = Path(__file__).parents[2]
_NO_SOURCE = shutil.ignore_patterns(".*", "build", "runs", "agent-state", "*.egg-info", "__pycache__")
_AUTHORITIES = Path("etc/ssl/certs/host.pem")
_HANDED_OVER = "index-url", "extra-index-url", "trusted-host", "proxy", "timeout", "retries"


def install(root: Path, extras: str, others: Sequence[str] = ()) -> None:
    """Install the checkout with its `extras` ("onnx") and `others` (requirements as pip takes them).

    Raises:
        SettingError: this is no checkout, or pip fails.
    """
    _hand_over_network(root)
    if not (root / VENV[1:] / "bin/pip").exists():
        _do(command(root, "python3", "-m", "venv", VENV))
    with TemporaryDirectory(dir=root / "tmp") as folder:
        wheel = "/" + str(build_wheel(Path(folder)).relative_to(root))
        # Twice: a changed checkout has the same version, and its dependencies need not be installed anew
        _do(command(root, "pip", "install", "--quiet", "--force-reinstall", "--no-deps", wheel))
        _do(command(root, "pip", "install", f"{wheel}[{extras}]" if extras else wheel, *others))


def build_wheel(folder: Path) -> Path:
    """A wheel of this checkout, in `folder`.

    Raises:
        SettingError: this is no checkout, or pip fails.
    """
    if not (CHECKOUT / "pyproject.toml").exists():
        raise SettingError(f"{CHECKOUT} is no checkout of Fleetune: call this from one")
    with TemporaryDirectory() as copy:  # setuptools takes in what an earlier build left beside the sources
        source = shutil.copytree(CHECKOUT, Path(copy) / "fleetune", ignore=_NO_SOURCE)
        _do([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder), str(source)])
    return next(folder.glob("fleetune-*.whl"))


def _hand_over_network(root: Path) -> None:
    """Names and packages come to the root from where the host has them."""
    shutil.copyfile("/etc/resolv.conf", root / "etc/resolv.conf")
    settings = pip_settings()
    authorities = settings.pop("cert", None)
    if authorities is not None:
        shutil.copyfile(authorities, root / _AUTHORITIES)
        settings["cert"] = f"/{_AUTHORITIES}"
    lines = [f"{name} = {value}\n" for name, value in settings.items()]
    (root / "etc/pip.conf").write_text("".join(["[global]\n", *lines]))


def pip_settings() -> dict[str, str]:
    """Where this host's pip looks for packages; not in folders, because those hold wheels for this host."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    pairs = [line.partition("=") for line in listed.stdout.splitlines()]
    pairs.sort(key=lambda pair: pair[0].startswith(":env:"))  # the environment has the last word
    found = {key.rpartition(".")[2]: str(ast.literal_eval(value)) for key, _, value in pairs}
    settings = {name: _no_files(found[name]) for name in _HANDED_OVER if name in found}
    authorities = found.get("cert") or os.environ.get("SSL_CERT_FILE")
    return {name: value for name, value in settings.items() if value} | (
        {"cert": authorities} if authorities else {}
    )


def _no_files(addresses: str) -> str:
    return " ".join(address for address in addresses.split() if not address.startswith(("file:", "/")))


def _do(words: Sequence[str]) -> None:
    if subprocess.run(words, cwd=CHECKOUT, check=False).returncode:
        raise SettingError(f"`{' '.join(words)}` failed, see above")
