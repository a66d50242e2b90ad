"""The runs that examples/ compares: every configuration's settings are ones that its method has."""

from pathlib import Path

import pytest
from tests.conftest import tiny_spec

from fleetune.protocols.methods import REGISTRY, from_section
from fleetune.protocols.settings.run_toml import read_run
from fleetune.tools.compare.configurations import configurations_of, labels_of

EXAMPLES = Path(__file__).parents[3] / "examples"
OF_PAPERS = ("fedspu", "srp-pfed", "kapc", "fedpurin", "dc-pfl")


@pytest.mark.parametrize("name", ["ablations", "rivals-fashion", "rivals-har"])
def test_every_configuration_can_be_made(name):
    settings = read_run(EXAMPLES / f"{name}.toml")
    for one in configurations_of(settings, labels_of(settings, "all")):
        from_section(one.method, tiny_spec())


def test_each_of_the_five_papers_has_variants_that_one_pattern_names():
    settings = read_run(EXAMPLES / "ablations.toml")
    for paper in OF_PAPERS:
        labels = labels_of(settings, f"{paper}*")
        methods = {one.label: one.method for one in configurations_of(settings, labels)}
        assert paper in methods
        assert len(methods) >= 3, paper
        assert {method["name"] for method in methods.values()} <= {
            name for name in REGISTRY if name.startswith(paper)
        }
        assert len({tuple(sorted(map(str, method.items()))) for method in methods.values()}) == len(methods)
