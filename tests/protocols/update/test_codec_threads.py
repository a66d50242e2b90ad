"""Payloads that are read in several threads: what a coordinator reads ahead, devices that train at once."""

import os
import subprocess
import sys

READ_AT_ONCE = '''
import sys, threading
from dataclasses import make_dataclass
from fleetune.protocols.update import codec
from tests.conftest import tiny_spec

spec = tiny_spec()
sys.setswitchinterval(1e-6)

def kinds():
    """One that holds others that hold others, which nobody has seen before."""
    made = []
    for depth in range(8):
        fields = [(f"f{number}", inner | None, None) for number, inner in enumerate(made)]
        made.append(make_dataclass(f"Kind{depth}", [("x", int), *fields]))
    return made

for _ in range(60):
    kind = kinds()[-1]
    data = codec.encode(kind(1), spec)
    together = threading.Barrier(4)
    def read():
        together.wait()
        assert codec.decode(data, kind, spec) == kind(1)
    threads = [threading.Thread(target=read) for _ in range(4)]
    for one in threads: one.start()
    for one in threads: one.join()
print("read")
'''


def test_a_kind_that_several_threads_read_for_the_first_time():
    """It took the process with it: msgspec 0.22."""
    told = subprocess.run(
        [sys.executable, "-c", READ_AT_ONCE],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (told.returncode, told.stdout) == (0, "read\n"), told.stderr[-2000:]
