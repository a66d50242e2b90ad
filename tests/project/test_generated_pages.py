"""The pages that are made from the code tell the truth about it: map of files, reference of run.toml."""

import pytest
from tests.helpers.places import ROOT

from fleetune.tools.docs.pages import PAGES


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_that_of_the_code(name):
    written = (ROOT / name).read_text(encoding="utf-8")
    assert written == PAGES[name](ROOT), f"{name} is old: python -m fleetune.tools.docs"
