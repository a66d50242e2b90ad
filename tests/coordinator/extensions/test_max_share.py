"""A device that claims many samples: how much its update counts, in every method, and who is told."""

import logging
from dataclasses import replace

import numpy as np
import pytest
from tests.helpers.every_method import SETTINGS
from tests.helpers.hostile_world import SPEC, World, stores_closed  # noqa: F401 - a fixture
from tests.helpers.nightly import of_methods

from fleetune.coordinator.queries.run_status import StatusReader
from fleetune.coordinator.reports.report import summary_of
from fleetune.coordinator.reports.tables import refused
from fleetune.coordinator.run.stored_run import look_at
from fleetune.coordinator.serving.console_output import print_devices
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.methods import from_section

HUGE, WITHIN = 10_000_000, 30  # of four updates one may have half: 30 beside three of 10 samples
LIAR = {"mallory": DeviceReport("mallory", num_samples=HUGE)}


@pytest.fixture
def weights():
    return np.linspace(-1, 1, SPEC.size, dtype=np.float32)


def claiming(samples):
    def forge(reply):
        if not hasattr(reply.update, "num_samples"):
            return reply
        return replace(reply, update=replace(reply.update, num_samples=samples))

    return forge


class Liars(World):
    def join(self):
        super().join(**LIAR)


def weighs(name, options):
    method = from_section({"name": name, **options}, SPEC)
    fields = method.update_type.__dataclass_fields__
    return method.weighs_by_samples and "num_samples" in fields


@pytest.mark.parametrize(("name", "options"), of_methods(SETTINGS))
def test_ten_million_samples_count_as_the_limit_allows(name, options, weights, tmp_path):
    liar = Liars(tmp_path / "liar", name, options, weights, forge=claiming(HUGE)).play()
    as_if = Liars(tmp_path / "as-if", name, options, weights, forge=claiming(WITHIN), max_share=1).play()
    assert np.array_equal(liar.shared(), as_if.shared())
    counted = [one.devices["mallory"].counted_samples for one in liar.closed if "mallory" in one.devices]
    if weighs(name, options):
        assert set(counted) == {WITHIN}
    else:
        assert set(counted) <= {None}
    assert all(one.devices[device].counted_samples is None for one in liar.closed for device in "abc")
    assert all(reply.counted_samples is None for one in as_if.closed for reply in one.devices.values())


def test_without_a_limit_the_liar_owns_the_model(weights, tmp_path):
    free = Liars(tmp_path / "a", "fedavg", {}, weights, forge=claiming(HUGE), max_share=1).play()
    held = Liars(tmp_path / "b", "fedavg", {}, weights, forge=claiming(HUGE)).play()
    mallorys = free.sessions["mallory"].personal_model
    error = [np.abs(world.shared() - mallorys)[: SPEC.num_parameters].max() for world in (free, held)]
    assert error[0] < 1e-5
    assert error[1] > 1e-3


def test_a_cut_is_logged_once_counted_and_shown(weights, tmp_path, caplog, capsys):
    with caplog.at_level(logging.WARNING):
        world = Liars(tmp_path, "fedavg", {}, weights, forge=claiming(HUGE)).play()
    [line] = [one.getMessage() for one in caplog.records if "max_share" in one.getMessage()]
    assert line.startswith("round 1: mallory claims 10000000 samples")
    assert line.endswith("its update counts as 30")
    summary = summary_of(world.run, simulated=False)
    assert summary.refused["share-cut"] == 4
    assert summary.refused_by_device == {"mallory": {"share-cut": 4}}
    assert (
        "share-cut",
        4,
        "update that counted as fewer samples than it claimed (round.max_share)",
    ) in refused(summary)
    print_devices(
        StatusReader(world.run.settings, 1).devices(
            world.run.controller.engine_state, world.run.controller.ledger
        )
    )
    assert "mallory: 4 updates counted as fewer samples than claimed" in capsys.readouterr().out
    world.run.store.close()
    with look_at(tmp_path) as again:
        assert again.controller.records()[-1].devices["mallory"].counted_samples == WITHIN
        assert again.controller.ledger.refusals["share-cut"] == 4


def test_a_restart_before_the_last_reply_changes_nothing(weights, tmp_path):
    world = Liars(tmp_path / "restarted", "fedavg", {}, weights, forge=claiming(HUGE))
    world.join()
    while world.finished is None:
        world.step()
        if len(world.state.replied) == 3:
            world.restart()
    whole = Liars(tmp_path / "whole", "fedavg", {}, weights, forge=claiming(HUGE)).play()
    assert np.array_equal(world.shared(), whole.shared())
    assert all(one.devices["mallory"].counted_samples == WITHIN for one in world.closed)
