"""What a device makes of the versions of the shared model: which it holds and gives up, what it tells."""

from types import SimpleNamespace

import numpy as np
import pytest
from msgspec import UNSET
from tests.helpers.errors import raises

from fleetune.edge_agent.extensions.adoption.deployed_model import DeployedModel, ModelRecord, read_deployed
from fleetune.edge_agent.extensions.adoption.roll_out import HeldVersion, Releases, RollOut
from fleetune.edge_agent.extensions.adoption.version_files import keep_deployed_as_version, withdraw_version
from fleetune.edge_agent.state.agent_store import FileMemory
from fleetune.edge_agent.state.deployed_files import DeployedFiles
from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.update import codec
from fleetune.protocols.wire.release import Release, ReleaseWord, Version

SPEC = SimpleNamespace(num_parameters=2, hash="00" * 8)
ENROLMENT = SimpleNamespace(weights=np.float32([9, 9, 0]), spec=SPEC, run="new", validation_fraction=0.2)
OWN = np.float32([5, 5, 0.25])  # the last is a running statistic


def weights(value):
    return np.float32([value, value])


def held(number, loss):
    return HeldVersion(number, np.float32([loss, loss, 0]))


class Judge:
    """Every sample loses the first weight, and a little more that is the sample's own."""

    def __init__(self, num_samples=20):
        self.noise = np.linspace(0, 0.1, num_samples)

    def losses(self, weights, part):
        assert part == "validation"
        return float(weights[0]) + self.noise * float(weights[0])


def report(releases, before, judge):
    return RollOut(SimpleNamespace(enrolment=ENROLMENT, trainer=judge), None, None).report(releases, before)


def record(run="old", number=3, model=SPEC.hash, **changes):
    return ModelRecord(run, number, False, model, (2,), 3, **({"held_out": 0.2} | changes))


def test_a_version_comes_with_its_weights_once_and_keeps_the_devices_statistics():
    first = Releases().after(Release(Version(0), Version(4, weights(1))), OWN, SPEC)
    assert (first.out, first.numbers, first.newest.number) == (0, (4,), 4)
    assert first.newest.weights.tolist() == [1, 1, 0.25]
    out = first.after(Release(Version(4)), OWN, SPEC)
    assert (out.out, out.numbers, out.newest.weights.tolist()) == (4, (4,), [1, 1, 0.25])
    assert out.withdrawn(first) == 0
    stopped = first.after(Release(Version(0)), OWN, SPEC)
    assert (stopped.newest, stopped.withdrawn(first)) == (None, 4)
    lacks = Releases().after(Release(Version(4)), OWN, SPEC)  # the coordinator thinks that it has them
    assert (lacks.out, lacks.numbers) == (4, ())
    with raises(PacketCorrupt, "version 5", "(1,)", "(2,)"):
        Releases().after(Release(Version(5, np.float32([1]))), OWN, SPEC)


def test_a_canary_tells_the_gain_over_the_version_before():
    word = report(Releases(2, held(2, 2.0), held(4, 1.5)), None, judge=Judge())
    assert (word.holds, word.found.new, word.found.old, word.found.by_samples) == ((2, 4), 4, 2, 20)
    assert word.found.gain == pytest.approx(0.5 * 1.05)
    worse = report(Releases(2, held(2, 1.0), held(4, 1.5)), None, judge=Judge()).found
    assert worse.gain < 0 < worse.error


@pytest.mark.parametrize(
    ("releases", "judge"),
    [
        (Releases(2, held(2, 2.0)), Judge()),  # no canary
        (Releases(2, held(2, 2.0), held(4, 1.5)), Judge(0)),
        (Releases(2, held(2, 2.0), held(4, 1.5)), Judge(7)),  # seven samples show nothing
        (Releases(2, None, held(4, 1.5)), Judge()),
        (Releases(2, held(2, 2.0), held(4, np.nan)), Judge()),
    ],
)
def test_a_device_that_cannot_compare_reports_no_comparison(releases, judge):
    word = report(releases, None, judge=judge)
    assert word == ReleaseWord(releases.numbers, UNSET)


def test_the_first_version_of_a_run_is_judged_against_what_the_device_served_before():
    trial = Releases(0, None, held(1, 2.0))
    of_this_model = DeployedModel(record(), np.float32([1, 1, 0]))
    of_another = DeployedModel(record(model="11" * 8, validation_loss=1.0, loss_error=0.1), np.float32([0]))
    for before in of_this_model, of_another:
        found = report(trial, before, judge=Judge()).found
        assert (found.old, round(found.by_samples)) == (0, 20)
        assert found.gain == pytest.approx(-1.05, abs=0.06)
    assert found.error > 0.1  # two errors, since the samples are not compared one by one
    trained_on_them = DeployedModel(record(held_out=0.0), np.float32([1, 1, 0]))
    for before in None, trained_on_them:  # then it is what the run began with, which loses 9
        assert report(trial, before, judge=Judge()).found.gain > 6


def test_a_withdrawn_version_leaves_no_file_and_the_one_before_is_served(tmp_path):
    files = DeployedFiles.next_to(FileMemory(tmp_path / "served"))
    old, bad = (
        codec.encode(DeployedModel(one, np.zeros(2, np.float32)), SPEC)
        for one in (record(), record("new", 4, version=2))
    )
    files.deployed.write(old)
    keep_deployed_as_version(files, 0)
    keep_deployed_as_version(files, 0)
    assert files.numbers == [1]
    files.version(2).write(bad)
    files.deployed.write(bad)
    withdraw_version(files, record("new", 3).origin)  # another one: nothing happens
    assert read_deployed(files.deployed.read()).record.run == "new"
    withdraw_version(files, record("new", 4).origin)
    assert files.numbers == [1]
    assert read_deployed(files.deployed.read()).record.run == "old"
    keep_deployed_as_version(files, 7)
    assert files.numbers == [1, 7]  # a version whose file is gone
    withdraw_version(files, record().origin)
    assert (files.numbers, files.deployed.read()) == ([], None)
