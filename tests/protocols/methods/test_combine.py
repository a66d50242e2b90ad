"""How updates are combined is replaceable: in every method that says so, and in no other."""

import numpy as np
import pytest
from tests.helpers.every_method import SETTINGS
from tests.helpers.nightly import of_methods
from tests.protocols.methods.test_method_contract import DEVICES, SPEC, Run

from fleetune.coordinator import combine
from fleetune.coordinator.combine import combine_for
from fleetune.protocols.errors import SettingError
from fleetune.protocols.update.combine import CoveredMean

IDS = ["-".join([name, *options]) for name, options in SETTINGS]


class Doubled(CoveredMean):
    """Twice the mean; it notes that it was used."""

    used = 0

    def over(self, previous):
        type(self).used += 1
        return 2 * super().over(previous)


@pytest.mark.parametrize(("name", "options"), of_methods(SETTINGS), ids=IDS)
def test_a_method_that_combines_uses_what_it_is_given(name, options):
    weights = np.linspace(-1, 1, SPEC.size, dtype=np.float32)
    mean, doubled = Run(name, options, weights), Run(name, options, weights)
    aggregate = doubled.method.aggregate
    object.__setattr__(doubled.method, "aggregate", lambda state, updates: aggregate(state, updates, Doubled))
    Doubled.used = 0
    for run in (mean, doubled):
        run.round(1, participants=DEVICES)
    same = (
        mean.method.shared_model(mean.state).tobytes() == doubled.method.shared_model(doubled.state).tobytes()
    )
    assert (Doubled.used > 0) == mean.method.combines
    assert same != mean.method.combines


def test_another_way_than_the_mean_is_refused_where_it_would_not_act(monkeypatch):
    monkeypatch.setattr(combine, "COMBINES", {"mean": CoveredMean, "doubled": Doubled})
    weights = np.zeros(SPEC.size, np.float32)
    assert combine_for(Run("fedavg", {}, weights).method, "doubled") is Doubled
    fedamp = Run("fedamp", {}, weights).method
    assert combine_for(fedamp) is CoveredMean
    with pytest.raises(SettingError, match="FedAMP"):
        combine_for(fedamp, "doubled")
    with pytest.raises(SettingError, match="mean, doubled"):
        combine_for(fedamp, "median")
