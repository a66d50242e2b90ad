"""A device's data that grow, in one run: the samples of a round, and what is told of them between rounds."""

from dataclasses import dataclass
from typing import Any

from fleetune.edge_agent.stream.sample_stream import Figures, SampleStream
from fleetune.edge_agent.stream.snapshot import Arrays
from fleetune.edge_agent.stream.values import Turn
from fleetune.edge_agent.stream.wanted import Part, Wanted
from fleetune.edge_agent.training.device_data import DeviceData, check_fits, fits_input, scaled
from fleetune.protocols.wire.messages import TransferKey
from fleetune.protocols.wire.payloads import Enrolment


def wanted(enrolment: Enrolment, test_fraction: float) -> Wanted:
    """What the run's model takes of a store of samples."""
    shape = enrolment.spec.input_shape
    return Wanted(
        lambda dtype, found: fits_input(found, shape, as_bytes=dtype == "|u1"),
        accepts=lambda label: bool(label < enrolment.spec.num_classes),
        test_fraction=test_fraction,
        validation_fraction=enrolment.validation_fraction,
    )


@dataclass
class GrowingData:
    """A stream as one run sees it.

    Attributes:
        stream: of the device.
        enrolment: of the run.
        test_fraction: of the samples, held out for testing.
    """

    stream: SampleStream
    enrolment: Enrolment
    test_fraction: float
    _known: tuple[int, Figures] | None = None

    def newest(self) -> DeviceData:
        """All samples as they are just now; from now on those that do not fit are refused.

        Raises:
            TooFewSamples: none to train on, or none to test on.
            DataError, SettingError: they do not fit the run.
            StoreError: they cannot be read.
        """
        self.stream.store.expect(self._wanted)
        parts, _ = self.stream.newest(self._wanted)
        return self._made(parts)

    def of_round(self, key: TransferKey) -> DeviceData:
        """The samples of a round: the same for the same task, also after a crash.

        Raises:
            TrainingStopped: there is nothing to train on.
            StoreError: they cannot be read.
        """
        return self._made(self.stream.of_round(self._wanted, _turn(key)))

    def trained(self, key: TransferKey) -> None:
        """The reply to a round's task is kept: its samples are new no longer. Raises StoreError."""
        self.stream.store.trained(_turn(key))

    def figures(self) -> Figures:
        """What there is just now; asked again it costs nothing where nothing came. Raises StoreError."""
        change = self.stream.store.change
        if self._known is None or self._known[0] != change:
            self._known = change, self.stream.figures(self._wanted)
        return self._known[1]

    @property
    def _wanted(self) -> Wanted:
        return wanted(self.enrolment, self.test_fraction)

    def _made(self, parts: dict[Part, Arrays]) -> DeviceData:
        arrays: dict[str, Any] = {}
        for part, (x, y) in parts.items():
            arrays |= {f"x_{part}": x, f"y_{part}": y}
        data = DeviceData(**arrays, source=self.stream.source)
        enrolment = self.enrolment
        fitted = check_fits(data, enrolment.spec)
        return scaled(fitted, enrolment.mean, enrolment.std, enrolment.spec)


def _turn(key: TransferKey) -> Turn:
    return Turn(key.run, key.round, key.attempt)
