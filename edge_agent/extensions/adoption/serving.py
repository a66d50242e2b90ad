"""Which rule decides what a device serves in a run: the one that the run was begun with."""

import logging

from msgspec import UNSET

from fleetune.edge_agent.extensions.adoption.deployed_model import Adoption, Serving
from fleetune.edge_agent.extensions.adoption.gated_adoption import GatedAdoption
from fleetune.edge_agent.state.deployed_files import DeployedFiles
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.protocols.errors import PacketError, StoreError
from fleetune.protocols.wire.payloads import Enrolment

log = logging.getLogger(__name__)


def serving_of(
    files: DeployedFiles, enrolment: Enrolment, trainer: LocalTrainer, *, session_keeps_newest: bool = False
) -> Serving:
    """A device's served model during a run.

    `session_keeps_newest`: see `Adoption`.

    Raises:
        PacketError: what is kept is damaged.
        StoreError: it cannot be read, or its new figures cannot be written.
    """
    section, data = enrolment.adoption, trainer.data
    num_validation, samples = data.compared.size, data.fingerprint
    if section is UNSET or not section.enabled:
        return Adoption(
            files.served,
            enrolment,
            trainer,
            num_validation=num_validation,
            samples=samples,
            session_keeps_newest=session_keeps_newest,
        )
    return GatedAdoption(files, enrolment, section, trainer, num_validation=num_validation, samples=samples)


def adoption_of(files: DeployedFiles, enrolment: Enrolment, trainer: LocalTrainer) -> Serving:
    """The same on a real device, which says what it lacks until it serves a model of the run.

    Raises:
        StoreError: what is kept is damaged, or cannot be read or written.
    """
    try:
        serving = serving_of(files, enrolment, trainer)
    except PacketError as problem:
        raise StoreError(
            f"{files.served.path}, the model that this device serves, is damaged ({problem}); restore or"
            " remove it"
        ) from None
    if not trainer.data.compared.size and serving.best is None:
        log.info(
            "run %s holds out no validation samples: the newest model that was trained is served;"
            " data.validation_fraction = 0.1 in its run.toml lets a device serve its best",
            enrolment.run,
        )
    return serving
