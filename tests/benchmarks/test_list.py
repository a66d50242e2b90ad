"""`python -m benchmarks` lists every benchmark, and the wheel has none of them."""

import pytest
from benchmarks import CHECKOUT
from benchmarks.__main__ import NAMES, first_line
from setuptools import find_packages
from tests.helpers.places import ROOT


def test_every_benchmark_is_listed():
    folder = ROOT / "benchmarks"
    packages = {path.parent.name for path in folder.glob("*/__main__.py")}
    modules = {
        path.stem for path in folder.glob("[a-z]*.py") if 'if __name__ == "__main__"' in path.read_text()
    }
    assert set(NAMES) == packages | modules
    assert CHECKOUT == ROOT


@pytest.mark.parametrize("name", NAMES)
def test_the_list_has_a_line_for_each(name):
    assert 20 < len(first_line(name)) < 110


def test_the_wheel_has_no_benchmarks():
    found = find_packages(str(ROOT / "src"))
    assert "fleetune.tools.bench" in found
    assert [name for name in found if "benchmarks" in name] == []
