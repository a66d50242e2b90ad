"""FedAvg with diagnostics: one correct variant, and variants with mistakes that a user's own method may
contain.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fleetune.protocols.method.diagnostics import MOST_PARTS, Diagnostic
from fleetune.protocols.methods.fedavg import FedAvg

SENT = Diagnostic("sent", "share sent", "Which share of the parameters an update has.", "share", "update")
PEAK = Diagnostic("peak", "greatest weight", "The largest magnitude by layer.", "number", "update", "layers")
SPREAD = Diagnostic("spread", "spread", "Standard deviation of the shared weights.", "number", "round")
KEPT = Diagnostic("kept", "own weight r_ii", "What a device keeps of its own.", "share", "round", "layers")
DIAGNOSTICS = (SENT, PEAK, SPREAD, KEPT)


@dataclass(frozen=True)
class Telling(FedAvg):
    diagnostics: ClassVar = DIAGNOSTICS

    def diagnose_update(self, update):
        weights = update.patch.apply(np.zeros(self.spec.size, np.float32), self.spec)
        peaks = {tensor.name: np.abs(view).max() for tensor, view in self.spec.views(weights)}
        return {"sent": np.float32(0.25), "peak": peaks}

    def diagnose_round(self, state):
        parts = {tensor.name: 0.1 for tensor in self.spec.tensors}
        return {"spread": float(state.weights.std()), "kept": parts}


@dataclass(frozen=True)
class Raising(Telling):
    def diagnose_update(self, update):
        return {"sent": 1 / 0}

    def diagnose_round(self, state):
        raise MemoryError("too much to tell")


@dataclass(frozen=True)
class Wrong(Telling):
    def diagnose_update(self, update):
        return {"sent": math.nan, "peak": 3.0, "spread": 1.0, "strange": 1.0}

    def diagnose_round(self, state):
        parts = {f"layer {number}": float(number) for number in range(10 * MOST_PARTS)}
        return {"spread": "wide", "kept": parts | {"layer 1": math.inf, "layer 2": 1e300}}


@dataclass(frozen=True)
class NoMapping(Telling):
    diagnostics: ClassVar = (*DIAGNOSTICS, SENT, "sent", Diagnostic("No Name", "", "", "share", "round"))

    def diagnose_update(self, update):
        return [1.0]

    def diagnose_round(self, state):
        return None
