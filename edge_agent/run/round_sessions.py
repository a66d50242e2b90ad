"""Makes the sessions of a run from the samples of a round and the device's stored state."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from fleetune.edge_agent.extensions.extension import ExtensionChain, RunStart
from fleetune.edge_agent.extensions.order import extensions_of
from fleetune.edge_agent.run.device import Device
from fleetune.edge_agent.run.memory_room import room
from fleetune.edge_agent.run.samples import Samples
from fleetune.edge_agent.run.session import Session
from fleetune.edge_agent.run.starting_model import starting_model
from fleetune.edge_agent.state.deployed_files import DeployedFiles
from fleetune.edge_agent.training.cached_features import cache_features, fits, upper_layers_of
from fleetune.edge_agent.training.device_data import DeviceData
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.protocols.errors import PacketError, PacketVersion, StoreError, StoreVersion
from fleetune.protocols.method.method import Method
from fleetune.protocols.wire.messages import TransferKey
from fleetune.protocols.wire.payloads import Enrolment

log = logging.getLogger(__name__)

SessionOfRound = Callable[[TransferKey], Session]


class RoundSessions:
    """Makes the sessions of a device in one run.

    Args:
        device: the device that takes part.
        enrolment: enrolment of the run.
        method: made from the enrolment.
        samples: the device's samples in this run.
        trainer: trainer of the run; its data are replaced for each round.
    """

    def __init__(
        self,
        device: Device,
        enrolment: Enrolment,
        method: Method[Any, Any, Any, Any],
        samples: Samples,
        trainer: LocalTrainer,
    ) -> None:
        self._device, self._enrolment, self._method = device, enrolment, method
        self._samples, self._trainer = samples, trainer
        self._upper = upper_layers_of(trainer.backend, enrolment.training)

    def of_round(self, key: TransferKey) -> Session:
        """Return a session with the samples of a round. Raises the errors of `Samples.of_round` and
        `of_trainer`.
        """
        vocabulary = self._trainer.backend.vocabulary
        data = self._samples.as_trained(self._samples.of_round(key), vocabulary)
        self._samples.note_round(replace(self._trainer, data=data))
        return self.of_trainer(self.trainer_of(data))

    def trainer_of(self, data: DeviceData) -> LocalTrainer:
        """Return a trainer of these samples; it caches the inputs of the model's upper layers if they fit in
        memory.
        """
        trainer, upper = self._trainer, self._upper
        if upper is None or not fits(upper, data, room(self._device.meter.conditions())):
            return replace(trainer, data=data)
        return replace(trainer, backend=upper.backend, data=cache_features(upper, data, trainer.stop))

    def of_trainer(self, trainer: LocalTrainer) -> Session:
        """Return a session that continues from the stored state, or starts anew if nothing is stored.

        Raises:
            StoreError: the stored state or the deployed model is damaged. It is never overwritten by a new
                start.
        """
        store, enrolment = self._device.store, self._enrolment
        memory, extensions = store.session(enrolment.run), self._extensions(trainer)
        try:
            session = Session(
                enrolment,
                self._device.settings.device,
                self._method,
                trainer,
                memory,
                extensions=extensions,
                own=partial(starting_model, store, enrolment),
            )
        except PacketVersion as problem:
            raise StoreVersion(f"{memory.path}: {problem}") from None
        except PacketError as problem:
            raise StoreError(
                f"{memory.path} is damaged ({problem}); restore it from a backup, or delete it to start"
                " from the shared model"
            ) from None
        if not trainer.data.compared.size and not session.last_round:
            log.info(
                "run %s holds out no validation samples: the newest model that was trained is deployed;"
                " data.validation_fraction = 0.1 in its run.toml lets a device deploy its best",
                enrolment.run,
            )
        return session

    def _extensions(self, trainer: LocalTrainer) -> ExtensionChain:
        file = self._device.store.deployed
        try:
            return extensions_of(RunStart.of(self._enrolment, trainer, DeployedFiles.next_to(file)))
        except PacketError as problem:
            raise StoreError(
                f"{file.path}, the model that this device deploys, is damaged ({problem}); restore or"
                " remove it"
            ) from None
