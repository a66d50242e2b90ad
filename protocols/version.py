"""The installed version of Fleetune."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("fleetune")
except PackageNotFoundError:
    VERSION = "unknown (not installed)"


def show_version(asked: bool) -> None:
    """Print the version and exit, if `asked` is True."""
    if asked:
        print(f"fleetune {VERSION}")
        raise SystemExit(0)
