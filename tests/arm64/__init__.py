"""An arm64 Debian on this machine, in which an agent is installed and runs: `python -m tests.arm64 --help`.

Programs run under qemu's user-mode emulation, or as they are on an arm64 host. That shows that an agent works
on such a board, not how fast: see docs/install/arm64-emulation.md.
"""
