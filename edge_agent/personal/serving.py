"""Which rule decides what a device serves in a run: the one that the run was begun with."""

from msgspec import UNSET

from fleetune.edge_agent.personal.gated_adoption import GatedAdoption
from fleetune.edge_agent.personal.served_model import Adoption, Serving
from fleetune.edge_agent.state.served_files import ServedFiles
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.protocols.wire.payloads import Enrolment


def serving_of(files: ServedFiles, enrolment: Enrolment, trainer: LocalTrainer) -> Serving:
    """A device's served model during a run.

    Raises:
        PacketError: what is kept is damaged.
        StoreError: it cannot be read, or its new figures cannot be written.
    """
    section, data = enrolment.adoption, trainer.data
    num_validation, samples = data.size("validation"), data.fingerprint
    if section is UNSET or not section.enabled:
        return Adoption(files.served, enrolment, trainer, num_validation=num_validation, samples=samples)
    return GatedAdoption(files, enrolment, section, trainer, num_validation=num_validation, samples=samples)
