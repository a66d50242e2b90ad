"""Real agents under a hard memory limit: they train within it, or decline with the figures."""

import os
from pathlib import Path

import pytest
from tests.helpers.fleet_processes import Fleet, images, run_toml
from tests.helpers.places import ROOT

V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
MB = 1_000_000


@pytest.fixture
def cgroup():
    """A function: the command prefix that puts a process under a limit. Removed at the end."""
    folders = []

    def limited(num_bytes):
        base, file = (V1, "memory.limit_in_bytes") if V1.is_dir() else (V2, "memory.max")
        folder = base / f"fleetune-test-{os.getpid()}-{len(folders)}"
        try:
            folder.mkdir()
            folders.append(folder)
            (folder / file).write_text(str(num_bytes))
        except OSError as problem:
            pytest.skip(f"no memory cgroup can be made here: {problem}")
        return ("sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$0" "$@"')

    yield limited
    for folder in folders:
        folder.rmdir()


def peak_bytes(prefix):
    folder = Path(prefix[2].split(" > ")[1].split("/cgroup.procs")[0])
    for name in ("memory.max_usage_in_bytes", "memory.peak"):
        if (folder / name).exists():
            return int((folder / name).read_text())
    return None


def source(tmp_path, monkeypatch):
    (tmp_path / "noise.py").write_text(
        "from tests.helpers.fleet_processes import images\n\ndef made():\n    return images()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    assert images()[0].shape == (600, 1, 28, 28)
    return "noise:made"


@pytest.mark.nightly
@pytest.mark.parametrize(("trainer", "limit"), [("torch", 512 * MB), ("onnx", 150 * MB)])
def test_an_agent_trains_lenet_within_a_limit_and_is_not_killed(
    tmp_path, monkeypatch, cgroup, trainer, limit
):
    toml = run_toml(
        devices=1, start_with=1, model="lenet5", shape="[1, 28, 28]", source=source(tmp_path, monkeypatch)
    )
    with Fleet(tmp_path, toml) as fleet:
        fleet.start_coordinator()
        (device,) = fleet.shares
        prefix = cgroup(limit)
        agent = fleet.start_agent(device, prefix=prefix, trainer=trainer)
        agent.wait_for("joined run")
        fleet.wait_finished()
        assert fleet.summary()["rounds"] == 3
        assert peak_bytes(prefix) is None or peak_bytes(prefix) <= limit


def test_an_agent_that_torch_alone_is_too_much_for_declines_with_the_figures(tmp_path, cgroup):
    with Fleet(tmp_path, run_toml(devices=2, start_with=1, rounds=2)) as fleet:
        fleet.start_coordinator()
        small, large = fleet.shares
        agent = fleet.start_agent(small, prefix=cgroup(150 * MB))
        agent.wait_for(r"declined: torch needs \d+ MB .* \d+ MB in use")
        fleet.start_agent(large)
        fleet.wait_finished()
        assert set(fleet.outcome().rounds[0][3]) == {large}
