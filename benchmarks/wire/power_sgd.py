"""PowerSGD (Vogels, Karimireddy, Jaggi 2019, arXiv:1905.13727), for comparison only."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks.wire.sender import Arrived
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.randomness import Key

Matrix = NDArray[np.float64]


@dataclass
class PowerSgd:
    """One step of subspace iteration a round, warm-started (Alg. 1), with error feedback (Alg. 2).

    A tensor of several axes is a matrix of its first axis by the others. Tensors of one axis are sent whole,
    as in the paper. So are tensors for which rank times both sides is no smaller. The mean of P is known
    before Q is computed. In a federated round that is a second exchange, which costs no byte up.

    Attributes:
        rank: rank of the approximation.
        spec: spec of the model.
    """

    rank: int
    spec: ModelSpec
    _left: dict[int, FlatArray] = field(default_factory=dict, init=False)
    _q: dict[int, Matrix] = field(default_factory=dict, init=False)

    def send(
        self, base: FlatArray, trained: Mapping[int, FlatArray], weights: Mapping[int, float], key: Key
    ) -> Arrived:
        steps = {device: values - base + self._left.get(device, 0) for device, values in trained.items()}
        mean, numbers = np.zeros(base.size, np.float32), 0
        read = {device: step.copy() for device, step in steps.items()}
        for index, place, rows in self._tensors():
            if not rows:
                numbers += place.stop - place.start
                mean[place] = sum(weights[one] * step[place] for one, step in steps.items())
                continue
            matrices = {one: step[place].reshape(rows, -1).astype(np.float64) for one, step in steps.items()}
            columns = (place.stop - place.start) // rows
            numbers += self.rank * (rows + columns)
            q = self._q.get(index)
            if q is None:
                q = key.child(index).generator().standard_normal((columns, self.rank))
            p = np.linalg.qr(sum(weights[one] * matrix @ q for one, matrix in matrices.items()))[0]
            own = {one: matrix.T @ p for one, matrix in matrices.items()}
            self._q[index] = sum(weights[one] * each for one, each in own.items())
            mean[place] = (p @ self._q[index].T).reshape(-1)
            for one, each in own.items():
                read[one][place] = (p @ each.T).reshape(-1)
        for device, step in steps.items():
            self._left[device] = step - read[device]
        return Arrived(mean, 4 * numbers * len(steps))

    def _tensors(self) -> Iterator[tuple[int, slice, int]]:
        """Number, place and matrix rows of each tensor; 0 rows: it is sent whole."""
        start = 0
        for index, tensor in enumerate(self.spec.tensors):
            place = slice(start, start + tensor.size)
            rows = tensor.shape[0] if len(tensor.shape) > 1 else 0
            if rows and self.rank * (rows + tensor.size // rows) >= tensor.size:
                rows = 0
            yield index, place, rows
            start = place.stop
