"""Packets that an attacker would make who knows the format: small on the wire, large when they are read.

`python -m tests.hostile` reads each as its receiver would and prints what that took, as JSON by name: bytes
of the packet, of an honest one, of memory at the peak, seconds, and the name of the exception.
"""

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zstandard
from tests.helpers.linear_bundle import bundle

from fleetune.protocols.bundle.bundle import Bundle, read_bundle
from fleetune.protocols.bundle.graph import Node
from fleetune.protocols.bundle.ort_training import cut
from fleetune.protocols.method.averaging import Task, Update
from fleetune.protocols.model.spec import ModelSpec, Span, TensorSpec
from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.update import codec
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Everything
from fleetune.protocols.wire.payloads import Assignment, Enrolment, Measures, Reply, read_enrolment

SPEC = ModelSpec(
    "wide",
    (
        TensorSpec("a.weight", (400, 100), "weight", "a", ((Span(0, 0, 400),), ())),
        TensorSpec("a.bias", (400,), "bias", "a", ((Span(0, 0, 400),),)),
    ),
    (400,),
    (100,),
    400,
)
WEIGHTS = np.random.default_rng(0).normal(size=SPEC.size).astype(np.float32)
MILLION = 10**6


@dataclass(frozen=True)
class Attack:
    """A packet, how its receiver reads it, and how long an honest one would be."""

    packet: bytes
    read: Callable[[bytes], Any]
    honest: int


def forged(content: Any, spec: ModelSpec = SPEC, num_bytes: int | None = None) -> bytes:
    """`content` as `codec.encode` would wrap it; bytes are a body already."""
    body = content if isinstance(content, bytes) else msgspec.msgpack.encode(content)
    packed = zstandard.ZstdCompressor().compress(body)
    size = len(body) if num_bytes is None else num_bytes
    head = codec.MAGIC, codec.VERSION, bytes.fromhex(spec.hash), size, codec._checksum(packed)
    return codec._HEADER.pack(*head) + packed


def array(kind: str, shape: list[int], num_bytes: int) -> Any:
    return [kind, shape, b"\0" * num_bytes]


def as_content(packet: bytes) -> Any:
    """What an honest packet holds, as plain lists and maps."""
    return msgspec.msgpack.decode(body_of(packet))


def body_of(packet: bytes) -> bytes:
    """What an honest packet holds, as MessagePack."""
    return zstandard.ZstdDecompressor().decompress(packet[codec._HEADER.size :])


def enrolment(**changes: Any) -> Enrolment:
    values = {
        "run": "run-1", "seed": 1, "spec": SPEC, "method": {"name": "fedavg"}, "training": TrainingSection(),
        "mean": 0.0, "std": 1.0, "validation_fraction": 0.0, "deadline_s": 60.0, "flops_per_sample": 1e6,
        "activation_bytes_per_sample": 1e3, "weights": WEIGHTS,
    }  # fmt: skip
    return Enrolment(**{**values, **changes})


def honest_reply() -> bytes:
    update = Update(Patch.of(WEIGHTS, Everything(), SPEC), 10)
    return codec.encode(Reply("a", 1, 1, False, Measures(10, 5, 0.5, 0.5, 0.5), update), SPEC)


def honest_task() -> bytes:
    return codec.encode(Assignment("a", 1, 1, False, Task(Patch.of(WEIGHTS, Everything(), SPEC))), SPEC)


def read_reply(packet: bytes) -> Any:
    return codec.decode(packet, Reply[Update], SPEC, limit=codec.payload_limit(SPEC))


def read_task(packet: bytes) -> Any:
    return codec.decode(packet, Assignment[Task], SPEC, limit=codec.payload_limit(SPEC))


def attacks() -> Iterator[tuple[str, Attack]]:
    """By name."""
    for name, packet in _enrolments():
        yield f"enrolment {name}", Attack(packet, read_enrolment, 150_000)
    for name, packet in _replies():
        yield f"reply {name}", Attack(packet, read_reply, 150_000)
    task = as_content(honest_task())
    task["task"]["patch"]["values"] = array("f4", [2**30], 2**20)
    yield "task with too few values", Attack(forged(task), read_task, 150_000)
    for name, packet in _bundles():
        yield f"bundle {name}", Attack(packet, read_bundle, 5_000)
    nothing = b"".join(b"\x10\x00" for _ in range(8 * MILLION))
    yield "training model of empty fields", Attack(nothing, lambda data: cut(data, ["loss"]), 5_000)


def _enrolments() -> Iterator[tuple[str, bytes]]:
    honest = as_content(codec.encode(enrolment(), SPEC))

    def changed(**changes: Any) -> bytes:
        return forged({**honest, **changes})

    def described(**changes: Any) -> bytes:
        return changed(spec={**honest["spec"], **changes})

    yield "that claims a terabyte", forged(honest, num_bytes=2**40)
    yield "of zeros", forged(b"\0" * 2**28)
    yield "of a text of zeros", changed(run="\0" * 2**28)
    yield "of empty maps", changed(method={"name": [{}] * 5 * MILLION})
    yield "of short texts", changed(method={"name": [f"{n % 100:02}" for n in range(2 * MILLION)]})
    yield "of numbers", changed(method={"name": [1.5] * MILLION})
    yield "of a list in a list", forged(b"\x91" * MILLION + b"\x90")
    yield "with a long array", changed(weights=array("f4", [2**26], 2**28))
    yield "with a bitmap", changed(weights=array("?", [2**30], 2**27))
    yield "with an array of nothing", changed(weights=array("f4", [0, 2**39, 2**39], 0))
    yield "with huge groups", described(groups=[2**39] * 20)
    yield "with many groups", described(groups=[1] * MILLION)
    yield "with many tensors", described(tensors=honest["spec"]["tensors"] * 100_000)
    tensor = honest["spec"]["tensors"][0]
    spans = [{"group": 0, "start": 0, "count": 1, "repeat": 1}] * 300_000
    yield "with many spans", described(tensors=[{**tensor, "axes": [spans, []]}])
    maps = [{}] * 199_000
    yield "of as many maps as there may be", changed(method={"name": maps})
    yield "of as many short texts as there may be", changed(method={f"{n:05}": "" for n in range(99_000)})
    yield "of as long a text as there may be", changed(method={"name": "\0" * 2**24})
    spans = [{"group": 0, "start": 1000 + n, "count": 1, "repeat": 1} for n in range(20_000)]
    yield "of as many spans as there may be", described(tensors=[{**tensor, "axes": [spans, []]}])
    yield "of a huge tensor", described(tensors=[{**tensor, "shape": [2**39, 2**39]}])


def _replies() -> Iterator[tuple[str, bytes]]:
    honest = as_content(honest_reply())

    def selected(selection: dict[str, Any], values: Any = None) -> bytes:
        patch = {"selection": selection, "values": values or array("f4", [0], 0)}
        return forged({**honest, "update": {"patch": patch, "num_samples": 1}})

    most = codec.payload_limit(SPEC) - 1000
    yield "with a bitmap of nothing", selected({"type": "Entries", "bitmap": array("?", [most * 8], most)})
    yield (
        "with neurons of nothing",
        selected({"type": "ChosenNeurons", "active": array("?", [most * 8], most)}),
    )
    yield "with many layers", selected({"type": "Layers", "names": ["a"] * (most // 2)})
    yield "with other layers", selected({"type": "Layers", "names": [f"{n:05}" for n in range(most // 6)]})
    yield "with nothing in lists", selected({"type": "Layers", "names": [[]] * most})
    yield "with values of nothing", selected({"type": "Everything"}, array("f4", [most // 4], most // 4 * 4))
    yield "with integers", selected({"type": "Everything"}, array("i8", [most // 8], most // 8 * 8))
    yield "with values in lists", selected({"type": "Everything"}, [[]] * most)
    yield "with a sample of none", selected({"type": "Neurons", "ratio": 1.0, "key": 2**64 - 1})


def _bundles() -> Iterator[tuple[str, bytes]]:
    made: Bundle = bundle()
    honest, spec = as_content(made.encoded()), made.spec
    train = honest["graphs"]["train"]

    def graph(**changes: Any) -> bytes:
        return forged({**honest, "graphs": {**honest["graphs"], "train": {**train, **changes}}}, spec)

    yield "of nodes", graph(nodes=[{"op": "Neg", "inputs": [], "outputs": [], "attributes": {}}] * MILLION)
    yield (
        "of unlike nodes",
        graph(
            nodes=[
                msgspec.to_builtins(Node("Neg", (f"{n}",), (f"{n + 1}",), {"a": 1.5})) for n in range(100_000)
            ]
        ),
    )
    yield (
        "of attributes",
        graph(nodes=[{"op": "Neg", "inputs": [], "outputs": [], "attributes": {"a": list(range(MILLION))}}]),
    )
    yield "of a constant of nothing", graph(constants=[{"name": "c", "value": array("?", [2**31], 2**28)}])
    yield (
        "of constants",
        graph(constants=[{"name": f"{n}", "value": array("f4", [0], 0)} for n in range(100_000)]),
    )
    yield "of an empty constant", graph(constants=[{"name": "c", "value": array("f4", [0, 2**39, 2**39], 0)}])
    yield "of names", forged({**honest, "class_names": [f"{n:03}" for n in range(MILLION)]}, spec)
    yield "of graphs", forged({**honest, "graphs": {f"{n}": train for n in range(10_000)}}, spec)
    yield "of noises", forged({**honest, "noises": [{"shape": [2**39], "p": 0.5}] * MILLION}, spec)
    nodes = [
        {"op": "Neg", "inputs": [f"{n}"], "outputs": [f"{n + 1}"], "attributes": {}} for n in range(35_000)
    ]
    yield "of as many nodes as there may be", graph(nodes=nodes)
    nodes = [{"op": "", "inputs": [], "outputs": [], "attributes": {}}] * 43_000
    yield "of as many empty nodes as there may be", graph(nodes=nodes)
    nodes = [{"op": "", "inputs": [], "outputs": [], "attributes": {"a": [1.5] * 64}}] * 5_500
    yield "of as many numbers as there may be", graph(nodes=nodes)
    yield (
        "of as large a bitmap as there may be",
        graph(constants=[{"name": "c", "value": array("?", [2**24], 2**21)}]),
    )
    yield (
        "of as many bytes as there may be",
        forged({**honest, "ort_training": {"file": b"\0" * 2**24}}, spec),
    )
    yield "of bytes", forged({**honest, "ort_training": {"file": b"\0" * 2**27}}, spec)


def _peak() -> int:
    """The most memory of this process since the last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return 1024 * int(line.split()[1])
    raise OSError("no VmHWM")


def _measured(attack: Attack) -> dict[str, Any]:
    Path("/proc/self/clear_refs").write_text("5")
    before, began, problem = _peak(), time.perf_counter(), ""
    try:
        attack.read(attack.packet)
    except Exception as raised:  # noqa: BLE001 - its name is the result
        problem = type(raised).__name__
    return {
        "packet": len(attack.packet),
        "honest": attack.honest,
        "peak": _peak() - before,
        "seconds": time.perf_counter() - began,
        "problem": problem,
    }


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (6 * 2**30, 6 * 2**30))
    json.dump({name: _measured(attack) for name, attack in attacks()}, sys.stdout, indent=1)
