"""`python -m tests.fuzz [--packets N] [--seed S] [--workers W]`: exits with 1 when anything was found."""

import argparse
import multiprocessing
import os
import sys
from collections import Counter

from tests.fuzz.run import SHARE, fuzz_share


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.fuzz", description=__doc__)
    parser.add_argument("--packets", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    chosen = parser.parse_args()
    os.nice(10)
    jobs = range(chosen.seed, chosen.seed + -(-chosen.packets // SHARE))
    total, verdicts, unlike = 0, Counter[str](), {}
    with multiprocessing.get_context("spawn").Pool(chosen.workers, maxtasksperchild=5) as pool:
        for count, counted, found in pool.imap_unordered(fuzz_share, jobs):
            total += count
            verdicts += counted
            unlike |= {one.what: one for one in found if one.what not in unlike}
            print(f"{total:,} packets, {len(unlike)} kinds of faults", flush=True)
    for one in unlike.values():
        print(f"\n{one.target}, seed {one.seed}: {one.what}\n{one.trace}\n{one.packet!r:.2000}")
    print(dict(verdicts.most_common()))
    return 1 if unlike else 0


if __name__ == "__main__":
    sys.exit(main())
