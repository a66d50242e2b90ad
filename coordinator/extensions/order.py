"""The order of extensions: the one place that declares it. Every hook runs through them in this order."""

from fleetune.coordinator.extensions.downsampling import Downsampling
from fleetune.coordinator.extensions.extension import Extension, Extensions, RunContext
from fleetune.coordinator.extensions.max_share import MaxShare
from fleetune.coordinator.extensions.method_diagnostics import MethodDiagnostics
from fleetune.coordinator.extensions.norm_bound import NormBound
from fleetune.coordinator.extensions.privacy.private_steps import PrivateSteps
from fleetune.coordinator.extensions.proposed_work import ProposedWork
from fleetune.coordinator.extensions.quarantine import Quarantine
from fleetune.coordinator.extensions.releases import Releases
from fleetune.coordinator.extensions.reply_claims import ReplyClaims
from fleetune.coordinator.extensions.staleness import StalenessDiscount
from fleetune.coordinator.extensions.update_steps import UpdateSteps

ORDER: tuple[type[Extension], ...] = (
    ReplyClaims,  # a claim that cannot be true is refused before anything is computed with it
    NormBound,
    Releases,
    ProposedWork,
    StalenessDiscount,
    UpdateSteps,  # before those that use its figures
    Quarantine,
    MaxShare,  # it limits what an update counts as after all other changes of its weight
    PrivateSteps,  # after all that changes an update: nothing may move what it has bounded
    MethodDiagnostics,
    Downsampling,
)


def extensions_of(run: RunContext) -> Extensions:
    """Return the extensions that a run uses, in their order."""
    found = (kind.of_run(run) for kind in ORDER)
    return Extensions(tuple(one for one in found if one is not None))
