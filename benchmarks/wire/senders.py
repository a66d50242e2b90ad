"""Senders: our encodings and published compressors, each with its state between rounds.

A sender gets the steps of all participants of a round together, because PowerSGD needs their sums. It adds
the residual to a device's next step (error feedback), as each paper does or allows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from benchmarks.recorded_updates import known_of
from benchmarks.wire.power_sgd import PowerSgd
from benchmarks.wire.rivals import Compressor, eden, eden_of_few, qsgd, stc
from benchmarks.wire.sender import Arrived, Sender
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.update import encodings
from fleetune.protocols.update.encodings.encoding import Encoding


@dataclass
class Encoded:
    """One of the product's encodings, with its residuals and bytes.

    With a residual, the received step is the wanted step minus the residual. Tests of the encodings show
    that `decode` returns the same up to float32 rounding. Decoding would take half of a run's time.

    Attributes:
        encoding: the encoding.
        spec: spec of the model.
    """

    encoding: Encoding
    spec: ModelSpec
    _residuals: dict[int, FlatArray | None] = field(default_factory=dict, init=False)

    def send(
        self, base: FlatArray, trained: Mapping[int, FlatArray], weights: Mapping[int, float], key: Key
    ) -> Arrived:
        known = known_of(np.ones(base.size, np.bool_), base, self.spec)
        mean, num_bytes = np.zeros(base.size), 0
        for device, values in trained.items():
            residual = self._residuals.get(device)
            encoded = self.encoding.encode(values, known, residual, key.child(device))
            self._residuals[device] = encoded.residual
            step = values.astype(np.float64) - base
            if encoded.residual is None:
                step = self.encoding.decode(encoded.data, base.size, known).astype(np.float64) - base
            else:
                step += (0.0 if residual is None else residual) - encoded.residual
            mean += weights[device] * step
            num_bytes += len(encoded.data)
        return Arrived(mean.astype(np.float32), num_bytes)


@dataclass
class Compressed:
    """A rival that compresses each device's step alone.

    Attributes:
        compress: the compressor.
        feedback: whether the residual is added to the next step.
    """

    compress: Compressor
    feedback: bool = True
    _left: dict[int, FlatArray] = field(default_factory=dict, init=False)

    def send(
        self, base: FlatArray, trained: Mapping[int, FlatArray], weights: Mapping[int, float], key: Key
    ) -> Arrived:
        mean, num_bytes = np.zeros(base.size), 0.0
        for device, values in trained.items():
            step = values - base
            if device in self._left:
                step += self._left[device]
            read, size = self.compress(step, key.child(device))
            if self.feedback:
                self._left[device] = step - read
            mean += weights[device] * read.astype(np.float64)
            num_bytes += size
        return Arrived(mean.astype(np.float32), num_bytes)


def _whole(step: FlatArray, key: Key) -> tuple[FlatArray, float]:  # noqa: ARG001 - nothing is drawn
    return step, 4 * step.size


def _product(name: str, **settings: float) -> Callable[[ModelSpec], Sender]:
    return lambda spec: Encoded(encodings.chosen({"name": name, **settings}), spec)


def _rival(compress: Compressor, *, feedback: bool = True) -> Callable[[ModelSpec], Sender]:
    return lambda _: Compressed(compress, feedback)


SENDERS: dict[str, Callable[[ModelSpec], Sender]] = {
    "dense": _rival(_whole),
    "int8": _product("int8"),
    "int4": _product("int4"),
    "eden": _rival(eden),
    "eden-plain": _rival(eden, feedback=False),
    "eden-50": _rival(eden_of_few(1 / 50), feedback=False),
    "eden-100": _rival(eden_of_few(1 / 100), feedback=False),
    "qsgd-1": _rival(qsgd(1), feedback=False),
    "stc-50": _rival(stc(1 / 50)),
    "stc-100": _rival(stc(1 / 100)),
    "stc-200": _rival(stc(1 / 200)),
    "stc-400": _rival(stc(1 / 400)),
    "powersgd-1": lambda spec: PowerSgd(1, spec),
    "powersgd-2": lambda spec: PowerSgd(2, spec),
    "sketch-20": _product("sketch", bits=1 / 20),
    "sketch-50": _product("sketch", bits=1 / 50),
    "sketch-200": _product("sketch", bits=1 / 200),
    "sketch-50-4": _product("sketch", bits=1 / 50, step=4),
    "sketch-50-8": _product("sketch", bits=1 / 50, step=8),
    "peaks-50": _product("peaks", bits=1 / 50),
    "peaks-100": _product("peaks", bits=1 / 100),
    "peaks-200": _product("peaks", bits=1 / 200),
    "lowrank-3": _product("lowrank", step=3),
    "lowrank-4": _product("lowrank", step=4),
    "lowrank-5": _product("lowrank", step=5),
    "sparse-20": _product("sparse", density=1 / 20, levels=1),
    "sparse-50": _product("sparse", density=1 / 50, levels=1),
    "sparse-100": _product("sparse", density=1 / 100, levels=1),
    "sparse-200": _product("sparse", density=1 / 200, levels=1),
}
