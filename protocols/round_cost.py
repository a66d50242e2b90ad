"""What a round takes of a device, predicted or measured."""

from msgspec import Struct

from fleetune.protocols.bounds import Amount, NumBytes, Share


class RoundCost(Struct, frozen=True, omit_defaults=True):
    """One device's part in one round; None: not known, which is never the same as 0.

    Attributes:
        bytes_down, bytes_up: payload bytes.
        download_s, train_s, upload_s: the device's work stands in `train_s`, evaluations included.
        memory_bytes: peak resident memory of the agent's process.
        joules: drawn by the whole board meanwhile.
        processor_s: of `train_s`, what the agent's threads used of processors. The rest is waiting, for other
            programs or the disk; with several threads at once it may be more than `train_s`. It is told
            where messages may be long.
        left_out: of what an update was to change, the share that its encoding left for a later one, by
            Euclidean length; it is told where the coordinator proposes encodings.
    """

    bytes_down: NumBytes | None = None
    bytes_up: NumBytes | None = None
    download_s: Amount | None = None
    train_s: Amount | None = None
    upload_s: Amount | None = None
    memory_bytes: NumBytes | None = None
    joules: Amount | None = None
    processor_s: Amount | None = None
    left_out: Share | None = None

    @property
    def known_s(self) -> float:
        """Seconds of the parts that are known."""
        parts = (self.download_s, self.train_s, self.upload_s)
        return sum(part for part in parts if part is not None)

    @property
    def round_s(self) -> float | None:
        """Seconds of the whole round; None unless every part is known."""
        parts = (self.download_s, self.train_s, self.upload_s)
        return None if None in parts else self.known_s
