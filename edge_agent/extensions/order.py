"""The order of the extensions. A device's run names them only here.

An extension may read the states of those before it: adoption compares with the local-only model and deploys
the versions of a roll-out. Privacy comes last: nothing may change what it has bounded.
"""

from typing import Any

from fleetune.edge_agent.extensions.adoption.adoption import Adoption
from fleetune.edge_agent.extensions.adoption.roll_out import RollOut
from fleetune.edge_agent.extensions.extension import Extension, ExtensionChain, RunStart
from fleetune.edge_agent.extensions.local_only import LocalOnly
from fleetune.edge_agent.extensions.optimiser_states import OptimiserStates
from fleetune.edge_agent.extensions.privacy import Privacy

ORDER: tuple[type[Extension[Any]], ...] = (OptimiserStates, LocalOnly, RollOut, Adoption, Privacy)


def extensions_of(start: RunStart) -> ExtensionChain:
    """Return the extensions that a run uses on this device.

    Raises:
        PacketError: the file of the deployed model is damaged.
        StoreError: that file cannot be read, or its new metrics cannot be written.
    """
    made = (kind.for_run(start) for kind in ORDER)
    return ExtensionChain(tuple(one for one in made if one is not None))
