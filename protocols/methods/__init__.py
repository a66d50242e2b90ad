"""The methods by name: one file each, one line here.

`create("fedspu", spec, {"early_stopping": True})` gives the method; a `package.module:Class` of the
user's own works the same way.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, get_type_hints

import msgspec

from protocols.errors import SettingError
from protocols.method import Method
from protocols.model import ModelSpec
from protocols.one_line import flat
from protocols.user_code import as_line, user_module

REGISTRY = {
    "local-only": "protocols.methods.local_only:LocalOnly",
    "fedavg": "protocols.methods.fedavg:FedAvg",
    "fedprox": "protocols.methods.fedprox:FedProx",
    "fedper": "protocols.methods.fedper:FedPer",
    "fedrep": "protocols.methods.fedrep:FedRep",
    "fedbabu": "protocols.methods.fedbabu:FedBABU",
    "fedbn": "protocols.methods.fedbn:FedBN",
    "lg-fed": "protocols.methods.lg_fed:LGFed",
    "ditto": "protocols.methods.ditto:Ditto",
    "per-fedavg": "protocols.methods.per_fedavg:PerFedAvg",
    "fedamp": "protocols.methods.fedamp:FedAMP",
    "fedcac": "protocols.methods.fedcac:FedCAC",
    "fedspu": "protocols.methods.fedspu:FedSPU",
    "fedpurin": "protocols.methods.fedpurin:FedPURIN",
    "srp-pfed": "protocols.methods.srp_pfed:SRPpFed",
    "kapc": "protocols.methods.kapc:KAPC",
    "kapc-bls": "protocols.methods.kapc:KAPCwithBLS",
    "dc-pfl": "protocols.methods.dcpfl:DCPFL",
    "fjord": "protocols.methods.fjord:FjORD",
    "fedmp": "protocols.methods.fedmp:FedMP",
    "hermes": "protocols.methods.hermes:Hermes",
    "prunefl": "protocols.methods.prunefl:PruneFL",
    "lotteryfl": "protocols.methods.lotteryfl:LotteryFL",
    "clusterfl": "protocols.methods.clusterfl:ClusterFL",
    "pfedsd": "protocols.methods.pfedsd:PFedSD",
    "moon": "protocols.methods.moon:MOON",
    "pfedla": "protocols.methods.pfedla:PFedLA",
    "cd2-pfed": "protocols.methods.cd2_pfed:CD2pFed",
    "perfedmask": "protocols.methods.perfedmask:PerFedMask",
}


def create(name: str, spec: ModelSpec, settings: Mapping[str, Any]) -> Method[Any, Any, Any, Any]:
    """The method `name` for a model, with `settings` (the keys of [method] but `name`).

    Raises:
        SettingError: no such method, or a key that is unknown, of the wrong type or out of range.
    """
    kind = _find(name)
    hints = get_type_hints(kind, include_extras=True)
    known = [field.name for field in dataclasses.fields(kind) if field.name != "spec"]
    checked = {key: _check(name, key, value, known, hints) for key, value in settings.items()}
    return kind(spec, **checked)  # type: ignore[no-any-return]


def from_section(section: Mapping[str, Any], spec: ModelSpec) -> Method[Any, Any, Any, Any]:
    """The method that a [method] section says, `name` and settings. Raises SettingError, as `create` does."""
    settings = {key: value for key, value in section.items() if key != "name"}
    return create(str(section.get("name")), spec, settings)


def _find(name: str) -> Any:
    target = REGISTRY.get(name, name)
    module, _, attribute = target.partition(":")
    if not attribute:
        near = difflib.get_close_matches(name, REGISTRY, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(REGISTRY)}"
        raise SettingError(f"method.name: no method {name!r}; {hint}")
    try:
        return getattr(user_module(module), attribute)
    except Exception as problem:  # a user's file may raise anything
        raise SettingError(f"method.name: cannot load {name!r}: {as_line(problem)}") from problem


def _check(method: str, key: str, value: Any, known: list[str], hints: dict[str, Any]) -> Any:
    if key not in known:
        allowed = ", ".join(known) or "none"
        raise SettingError(f"method.{flat(key)}: {method} has no such setting; it has: {allowed}")
    try:
        return msgspec.convert(value, hints[key])
    except msgspec.ValidationError as problem:
        raise SettingError(f"method.{key}: {str(problem)[0].lower()}{str(problem)[1:]}") from None
