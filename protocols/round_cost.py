"""The cost of a round on a device, predicted or measured."""

from msgspec import Struct, field

from fleetune.protocols.bounds import Amount, NumBytes, Share


class RoundCost(Struct, frozen=True, omit_defaults=True):
    """The cost of one device's part in one round; None if unknown, which differs from 0.

    Attributes:
        bytes_down, bytes_up: payload bytes.
        download_s, train_s, upload_s: seconds; `train_s` includes evaluations.
        memory_bytes: peak resident memory of the agent's process.
        joules: energy drawn by the whole board.
        processor_s: processor time of the agent's threads within `train_s`; the rest is waiting. With several
            threads it may exceed `train_s`. It is reported where messages may be long.
        compression_error: compression error of the update, as a share of its Euclidean length. A device
            reports it if the coordinator proposes encodings. Its name on the wire is `left_out`.
    """

    bytes_down: NumBytes | None = None
    bytes_up: NumBytes | None = None
    download_s: Amount | None = None
    train_s: Amount | None = None
    upload_s: Amount | None = None
    memory_bytes: NumBytes | None = None
    joules: Amount | None = None
    processor_s: Amount | None = None
    compression_error: Share | None = field(default=None, name="left_out")

    @property
    def known_s(self) -> float:
        """The sum of the known parts, in seconds."""
        parts = (self.download_s, self.train_s, self.upload_s)
        return sum(part for part in parts if part is not None)

    @property
    def round_s(self) -> float | None:
        """Duration of the whole round in seconds; None unless every part is known."""
        parts = (self.download_s, self.train_s, self.upload_s)
        return None if None in parts else self.known_s
