"""The device's own models: the model with which a run starts, and the deployed model."""

import logging

from fleetune.edge_agent.extensions.adoption.deployed_model import DeployedModel, read_deployed
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.protocols.model.carried_layers import carry_over
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.wire.payloads import Enrolment, read_enrolment

log = logging.getLogger(__name__)


def deployed_weights(store: AgentStore, enrolment: Enrolment) -> FlatArray | None:
    """Return the deployed model, shape (spec.size,); None if there is none or it has another structure."""
    found = read_deployed(store.deployed.read())
    return None if found is None or not found.record.is_of(enrolment.spec) else found.weights


def starting_model(store: AgentStore, enrolment: Enrolment) -> FlatArray | None:
    """Return the deployed model if the run continues one of this device's runs; None for the shared model.

    If the deployed model has another version of the structure, the layers that both share are kept.
    """
    before, deployed = enrolment.continues, read_deployed(store.deployed.read())
    if before is None or deployed is None:
        return None
    if deployed.record.run != before and store.session(before).read() is None:
        return None
    weights, words = _carried(enrolment, deployed, store.enrolment(deployed.record.run).read())
    if weights is not None:
        log.info(
            "goes on from run %s with this device's own model%s: %s", before, words, deployed.record.words
        )
    return weights


def _carried(
    enrolment: Enrolment, deployed: DeployedModel, data: bytes | None
) -> tuple[FlatArray | None, str]:
    """Return the weights that a run's model takes over from a deployed model, and a readable description.

    `data` is the enrolment of the run that the deployed model comes from.
    """
    if deployed.record.is_of(enrolment.spec):
        return deployed.weights, ""
    if data is None or not deployed.record.is_of(before := read_enrolment(data).spec):
        return None, ""
    found = carry_over(before, deployed.weights, enrolment.spec, enrolment.weights)
    return (found.weights, f", {found.words}") if found.layers else (None, "")
