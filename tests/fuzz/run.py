"""The loop: mutate, read, and note what is neither read nor refused by name."""

import logging
import random
import time
import traceback
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tests.fuzz.mutation import PAYLOAD, Wrapping, mutated
from tests.fuzz.targets import Target, all_targets

from fleetune.protocols.errors import FleetuneError

SHARE = 20_000  # packets of a job
MOST_SECONDS = 5.0  # for one packet; what never ends is what is looked for
MOST_BYTES = 150_000_000  # that the process may grow by


@dataclass(frozen=True)
class Found:
    """A packet that was not read as it should be."""

    target: str
    seed: int
    what: str
    trace: str
    packet: bytes


def fuzz(seed: int, count: int) -> tuple[int, Counter[str], list[Found]]:
    """`count` packets drawn by `seed`: how many, verdicts by name, and what was found."""
    logging.disable(logging.CRITICAL)
    rng, verdicts, found = random.Random(seed), Counter[str](), []
    with ExitStack() as closing, np.errstate(all="ignore"):
        targets = all_targets(closing)
        donors = _donors(targets)
        before = resident()
        for _ in range(count):
            target = rng.choice(targets)
            packet = mutated(
                rng, rng.choice(target.packets), target.wrapping, rng.choice(donors[target.wrapping])
            )
            verdict = _verdict(target, packet, seed)
            verdicts[verdict if isinstance(verdict, str) else "found"] += 1
            found += [] if isinstance(verdict, str) else [verdict]
        grown = resident() - before
        if grown > MOST_BYTES:
            found.append(Found("all", seed, f"the process grew by {grown} bytes", "", b""))
    logging.disable(logging.NOTSET)
    return count, verdicts, found


def fuzz_share(seed: int) -> tuple[int, Counter[str], list[Found]]:
    """A job's share."""
    return fuzz(seed, SHARE)


def _donors(targets: list[Target]) -> dict[Wrapping | None, list[object]]:
    """What packets of the same wrapping may lend each other; not the large ones."""
    found: dict[Wrapping | None, list[object]] = {None: [None]}
    for target in targets:
        if target.wrapping is not None:
            small = [packet for packet in target.packets if len(packet) < 2000]
            found.setdefault(target.wrapping, [None]).extend(map(target.wrapping.read, small))
    assert len(found[PAYLOAD]) > 50
    return found


def _verdict(target: Target, packet: bytes, seed: int) -> str | Found:
    began = time.perf_counter()
    try:
        target.read(packet)
        verdict = "read"
    except FleetuneError as problem:
        verdict = type(problem).__name__
        if "\n" in str(problem):
            return Found(target.name, seed, f"{verdict} of several lines", str(problem), packet)
    except Exception as fault:  # noqa: BLE001 - this is what is looked for
        place = traceback.extract_tb(fault.__traceback__)[-1]
        what = f"{type(fault).__name__} in {Path(place.filename).name}:{place.name}"
        return Found(target.name, seed, what, traceback.format_exc(), packet)
    if time.perf_counter() - began > MOST_SECONDS and (took := _again(target, packet)) > MOST_SECONDS:
        return Found(target.name, seed, f"{target.name} took {took:.1f} s", "", packet)
    return verdict


def _again(target: Target, packet: bytes) -> float:
    """Seconds of this thread alone: the machine may have been busy with others."""
    began = time.thread_time()
    with suppress(FleetuneError):
        target.read(packet)
    return time.thread_time() - began


def resident() -> int:
    """Bytes of memory that this process takes; 0: not known."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * 4096
