"""Which Fleetune this is, as its installation says."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("fleetune")
except PackageNotFoundError:
    VERSION = "unknown (not installed)"


def show_version(asked: bool) -> None:
    """Of a program that was asked for it: print it and stop."""
    if asked:
        print(f"fleetune {VERSION}")
        raise SystemExit(0)
