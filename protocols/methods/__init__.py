"""The registry of methods by name: one file for each method, one line here.

`create("fedspu", spec, {"early_stopping": True})` makes a method. A user's own `package.module:Class` works
the same way.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

import msgspec

from fleetune.protocols.errors import SettingError
from fleetune.protocols.method.choice import Budget
from fleetune.protocols.method.diagnostics import Diagnostic, declared_diagnostics
from fleetune.protocols.method.method import Method
from fleetune.protocols.method.utility import default_utility
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.one_line import flat, suggestion
from fleetune.protocols.settings.task import TaskKind
from fleetune.protocols.user_code import as_line, user_module

REGISTRY = {
    "local-only": "fleetune.protocols.methods.local_only:LocalOnly",
    "fedavg": "fleetune.protocols.methods.fedavg:FedAvg",
    "fedprox": "fleetune.protocols.methods.fedprox:FedProx",
    "fedper": "fleetune.protocols.methods.fedper:FedPer",
    "fedrep": "fleetune.protocols.methods.fedrep:FedRep",
    "fedbabu": "fleetune.protocols.methods.fedbabu:FedBABU",
    "fedbn": "fleetune.protocols.methods.fedbn:FedBN",
    "lg-fed": "fleetune.protocols.methods.lg_fed:LGFed",
    "ditto": "fleetune.protocols.methods.ditto:Ditto",
    "per-fedavg": "fleetune.protocols.methods.per_fedavg:PerFedAvg",
    "fedamp": "fleetune.protocols.methods.fedamp:FedAMP",
    "fedcac": "fleetune.protocols.methods.fedcac:FedCAC",
    "fedspu": "fleetune.protocols.methods.fedspu:FedSPU",
    "fedpurin": "fleetune.protocols.methods.fedpurin:FedPURIN",
    "srp-pfed": "fleetune.protocols.methods.srp_pfed:SRPpFed",
    "kapc": "fleetune.protocols.methods.kapc.kapc:KAPC",
    "kapc-bls": "fleetune.protocols.methods.kapc.kapc:KAPCwithBLS",
    "dc-pfl": "fleetune.protocols.methods.dcpfl.dcpfl:DCPFL",
    "fjord": "fleetune.protocols.methods.fjord:FjORD",
    "fedmp": "fleetune.protocols.methods.fedmp:FedMP",
    "hermes": "fleetune.protocols.methods.hermes:Hermes",
    "prunefl": "fleetune.protocols.methods.prunefl:PruneFL",
    "lotteryfl": "fleetune.protocols.methods.lotteryfl:LotteryFL",
    "clusterfl": "fleetune.protocols.methods.clusterfl:ClusterFL",
    "pfedsd": "fleetune.protocols.methods.pfedsd:PFedSD",
    "moon": "fleetune.protocols.methods.moon:MOON",
    "pfedla": "fleetune.protocols.methods.pfedla:PFedLA",
    "cd2-pfed": "fleetune.protocols.methods.cd2_pfed:CD2pFed",
    "perfedmask": "fleetune.protocols.methods.perfedmask:PerFedMask",
}


_MANY = 1000  # also written with a number of rounds, because some defaults depend on that number


def create(name: str, spec: ModelSpec, settings: Mapping[str, Any]) -> Method[Any, Any, Any, Any]:
    """Create the method `name` for a model, with `settings` (the keys of [method] except `name`).

    Raises:
        SettingError: the method does not exist, or a key is unknown, of the wrong type or out of range.
    """
    kind = _find(name)
    hints = get_type_hints(kind, include_extras=True)
    known = [field.name for field in dataclasses.fields(kind) if field.name != "spec"]
    checked = {key: _check(name, key, value, known, hints) for key, value in settings.items()}
    return kind(spec, **checked)  # type: ignore[no-any-return]


def from_section(
    section: Mapping[str, Any], spec: ModelSpec, kind: TaskKind | None = None
) -> Method[Any, Any, Any, Any]:
    """Create the method of a [method] section from its `name` and settings.

    Args:
        section: the run's [method] section.
        spec: the run's model.
        kind: kind of the run's task; None skips the check of the task.

    Raises:
        SettingError: as in `create`, or the method does not support this task.
    """
    name = str(section.get("name"))
    method = create(name, spec, {key: value for key, value in section.items() if key != "name"})
    if kind is not None and method.tasks is not None and kind not in method.tasks:
        its_own = ", ".join(sorted(method.tasks))
        raise SettingError(
            f"method.name: {name} supports {its_own} only, and task.kind is {kind!r}; choose another method"
        )
    return method


def with_defaults_of_run(
    section: Mapping[str, Any], rounds: int | None, *, time_counts: bool = False
) -> dict[str, Any]:
    """Return a [method] section with the defaults that depend on the run (see `Method.defaults_of_run`).

    Args:
        section: the run's [method] section.
        rounds: the run's number of rounds; None if it is open. Defaults that need a number are then missing.
        time_counts: True adds the defaults of `Method.defaults_of_objective`.

    Raises:
        SettingError: the method does not exist, or a default needs a number of rounds and the run has none.
    """
    kind = _find(str(section.get("name")))
    defaults = kind.defaults_of_run(rounds or 1)
    missing = {} if rounds else {key: value for key, value in defaults.items() if key not in section}
    if missing and (other := kind.defaults_of_run(_MANY)) != defaults:
        key = next((key for key in missing if other.get(key) != missing[key]), None)
        if key is not None:
            raise SettingError(
                f'method.{key}: its default depends on run.rounds, which is "open"; set a value,'
                f" e.g. {key} = 50"
            )
    decided = {**defaults, **(kind.defaults_of_objective() if time_counts else {})}
    return {**section, **{key: value for key, value in decided.items() if key not in section}}


def with_defaults_at_start(section: Mapping[str, Any], begun: Mapping[str, Any]) -> dict[str, Any]:
    """Return a changed [method] section with the defaults that were stored when the run started.

    Args:
        section: the new section.
        begun: the section that the run started with.

    Raises:
        SettingError: the method does not exist.
    """
    kind = _find(str(section.get("name")))
    decided = {**kind.defaults_of_run(1), **kind.defaults_of_objective()}
    return {**section, **{key: begun[key] for key in decided if key in begun and key not in section}}


def diagnostics_of(section: Mapping[str, Any]) -> tuple[Diagnostic, ...]:
    """Return the diagnostics of a [method] section's method; () if the method cannot be loaded."""
    try:
        return declared_diagnostics(_find(str(section.get("name"))))
    except SettingError:
        return ()


def selects_neurons(section: Mapping[str, Any]) -> bool:
    """Return `Method.selects_neurons` of a [method] section's method; False if it cannot be loaded."""
    try:
        return bool(_find(str(section.get("name"))).selects_neurons)
    except SettingError:
        return False


def utility_of(section: Mapping[str, Any]) -> Callable[[Budget], float]:
    """Return `Method.utility` of a [method] section's method; the default if the method cannot be loaded."""
    try:
        found: Callable[[Budget], float] = _find(str(section.get("name"))).utility
    except SettingError:
        return default_utility
    return found


def method_class(name: str) -> Any:
    """Return the class of a method. Raises SettingError if it does not exist."""
    return _find(name)


def _find(name: str) -> Any:
    target = REGISTRY.get(name, name)
    module, _, attribute = target.partition(":")
    if not attribute:
        raise SettingError(f"method.name: no method {name!r}; {suggestion(name, REGISTRY)}")
    try:
        return getattr(user_module(module), attribute)
    except Exception as problem:  # importing a user's file may raise any exception
        raise SettingError(f"method.name: cannot load {name!r}: {as_line(problem)}") from problem


def _check(method: str, key: str, value: Any, known: list[str], hints: dict[str, Any]) -> Any:
    if key not in known:
        allowed = ", ".join(known) or "none"
        raise SettingError(f"method.{flat(key)}: {method} has no such setting; it has: {allowed}")
    try:
        return msgspec.convert(value, hints[key])
    except msgspec.ValidationError as problem:
        raise SettingError(f"method.{key}: {str(problem)[0].lower()}{str(problem)[1:]}") from None
