"""The trackers by name: one file each, one line here; and any of a user's own, `package.module:function`."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec

from fleetune.coordinator.trackers.tracker import Make, TrackedRun, Tracker
from fleetune.protocols.errors import SettingError
from fleetune.protocols.user_code import as_line, user_module


@dataclass(frozen=True)
class Known:
    """A tracker that comes with Fleetune.

    Attributes:
        package: that it needs, as it is imported.
        install: how it comes there.
        made_by: `module:class` of ours.
    """

    package: str
    install: str
    made_by: str


TRACKERS = {
    "tensorboard": Known("tensorboard", "pip install tensorboard", "tensorboard:TensorBoard"),
    "mlflow": Known("mlflow", "pip install mlflow-skinny sqlalchemy alembic", "mlflow:MLflow"),
}


def makers_of(trackers: Iterable[str | Make]) -> dict[str, Make]:
    """What makes each tracker that is asked for, by its name; nothing heavy is imported yet.

    Raises:
        SettingError: there is none of that name, or what it needs is not installed.
    """
    makers: dict[str, Make] = {}
    for one in trackers:
        if isinstance(one, str):
            makers[one] = _maker(one)
            continue
        name = getattr(one, "__name__", type(one).__name__)
        makers[f"{name} {len(makers) + 1}" if name in makers else name] = one
    return makers


def _maker(name: str) -> Make:
    if ":" in name:
        return _users(name)
    known = TRACKERS.get(name)
    if known is None:
        near = difflib.get_close_matches(name, TRACKERS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(TRACKERS)}"
        raise SettingError(f"tracker {name}: there is none; {hint} (or package.module:function of yours)")
    if find_spec(known.package) is None:
        raise SettingError(f"tracker {name}: it is not installed here: {known.install}")
    return partial(_made, known)


def _made(known: Known, run: TrackedRun) -> Tracker:
    module, _, kind = known.made_by.partition(":")
    tracker: Tracker = getattr(import_module(f"fleetune.coordinator.trackers.{module}"), kind)(run)
    return tracker


def _users(name: str) -> Make:
    module, _, function = name.partition(":")
    try:
        make: Make = getattr(user_module(module), function)
    except Exception as problem:  # noqa: BLE001 - a user's module may raise anything
        raise SettingError(f"tracker {name}: {as_line(problem)}") from None
    return make
