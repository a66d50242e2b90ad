"""The model that a device begins a run with, where it goes on from one in which it took part."""

from dataclasses import replace

import numpy as np
import pytest

from fleetune.coordinator.run.enrolment import prepare
from fleetune.edge_agent.extensions.adoption.deployed_model import DeployedModel, ModelRecord
from fleetune.edge_agent.run.starting_model import starting_model
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.protocols.model.carried_layers import carry_over
from fleetune.protocols.settings.run_toml import parse_run
from fleetune.protocols.update import codec


@pytest.mark.parametrize("took_part", [True, False])
def test_a_device_keeps_the_layers_of_its_own_model_that_a_new_version_has(tmp_path, took_part):
    """The same rule as `tools.simulator.starting_models`."""
    store, shape = AgentStore(tmp_path), {"name": "mlp", "input_shape": [1, 8, 8]}
    old, new = (
        prepare(
            parse_run(
                {
                    "run": {"name": name},
                    "model": {**shape, "num_classes": classes},
                    "method": {"name": "fedavg"},
                }
            )
        )
        for name, classes in (("old", 10), ("new", 12))
    )
    mine = np.full(old.spec.size, 0.5, np.float32)
    record = ModelRecord("old-1", 3, False, old.spec.hash, (1, 8, 8), 10)
    store.enrolment("old-1").write(codec.encode(replace(old, run="old-1"), old.spec))
    store.deployed.write(codec.encode(DeployedModel(record, mine), old.spec))
    enrolment = replace(new, continues="old-1" if took_part else "another")
    found = starting_model(store, enrolment)
    if not took_part:
        assert found is None
        return
    wanted = carry_over(old.spec, mine, new.spec, new.weights).weights
    assert found.tobytes() == wanted.tobytes()
    assert (found == 0.5).any()
    assert found.tobytes() != new.weights.tobytes()
    store.enrolment("old-1").path.unlink()
    assert starting_model(store, enrolment) is None, "without the old model nobody knows what is which"
