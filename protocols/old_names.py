"""Names from before everything stood in one package: users' methods, and runs that name them, are read.

Until commit 6e33d00 a method began with `from protocols.method import Budget, Choice`. Where the user has no
module of that name, one is made that holds what `fleetune` makes public today, so that a run which was begun
with such a method goes on with it.
"""

import logging
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

log = logging.getLogger(__name__)

_PACKAGES = ("protocols", "protocols.methods")
_MODULES = frozenset(
    f"protocols.{name}"
    for name in (
        *("bounds", "codec", "errors", "exchange", "guide", "method", "model", "patch", "randomness"),
        *("selection", "submodel", "targets"),
    )
)
_RENAMED = {"ModelExchange": "ModelAveraging", "TargetExchange": "PersonalTargets"}
_PUBLIC = ("fleetune", "fleetune.protocols.errors", "fleetune.protocols.bounds")


class OldNames(MetaPathFinder, Loader):
    """Stands last in `sys.meta_path`: whatever the user has by such a name comes first."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        if name in _MODULES or name in _PACKAGES or name.startswith("protocols.methods."):
            return ModuleSpec(name, self, is_package=name in _PACKAGES)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:  # noqa: ARG002
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if name in _PACKAGES:
            return
        log.warning("`%s` is an old name: import from `fleetune` instead, see docs/add-a-method.md", name)

        def its(attribute: str) -> object:
            found = None if attribute.startswith("__") else _today(attribute)
            if found is None:
                raise AttributeError(
                    f"module {name!r} has no attribute {attribute!r}; see `fleetune.__all__`"
                )
            return found

        vars(module)["__getattr__"] = its


def _today(name: str) -> object | None:
    """What is called so now, among what is public and the methods' classes; None: nothing."""
    for place in _PUBLIC:
        found: object = getattr(import_module(place), _RENAMED.get(name, name), None)
        if found is not None:
            return found
    targets = import_module("fleetune.protocols.methods").REGISTRY.values()
    module = next(
        (module for module, _, kind in (one.partition(":") for one in targets) if kind == name), None
    )
    return None if module is None else getattr(import_module(module), name)
