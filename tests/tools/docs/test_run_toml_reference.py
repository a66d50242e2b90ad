"""The reference of run.toml: words for every type and default, every key described, and who heeds it."""

from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta, Struct

from fleetune.coordinator.run.changed_settings import CHANGEABLE
from fleetune.protocols.methods import REGISTRY
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.tools.docs.docstrings import attributes, first_sentence
from fleetune.tools.docs.run_toml_reference import UndescribedError, described, run_toml_reference
from fleetune.tools.docs.value_words import default_words, unit, value_words


class Example(Struct):
    """An example.

    Attributes:
        first, second: share one text, that goes
            on: over two lines.
        third: a text of its own.

    What follows is: no attribute.
    """

    first: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    second: Annotated[float, Meta(gt=0, lt=1)] | None = None
    third: Literal["b", "a"] = "a"
    forgotten: bool = True
    pair: tuple[float, float] = (0.5, 1.0)
    many: Annotated[tuple[str, ...], Meta(max_length=3)] = ()
    large: Annotated[float, Meta(ge=1e-6, le=1e15)] = 1e-6
    named: dict[str, Annotated[int, Meta(ge=0)]] = {}


def fields():
    return {field.name: field for field in msgspec.inspect.type_info(Example).fields}


@pytest.mark.parametrize(
    ("name", "words", "default"),
    [
        ("first", "whole number, 1 to 2^31 - 1", "**required**"),
        ("second", "number, above 0, to below 1", "left out"),
        ("third", '`"a"`, `"b"`', '`"a"`'),
        ("forgotten", "`true`, `false`", "`true`"),
        ("pair", "2 of: number", "`[0.5, 1.0]`"),
        ("many", "list, at most 3 of: text", "left out"),
        ("large", "number, 1e-6 to 1e15", "`1e-06`"),
        ("named", "table of name = whole number, 0 or more", "left out"),
    ],
)
def test_a_type_and_its_default_have_words(name, words, default):
    assert value_words(fields()[name].type) == words
    assert default_words(fields()[name]) == default


def test_units_stand_in_names():
    assert [unit(key) for key in ("deadline_s", "uplink_mbps", "noise_dbm_hz", "epochs")] == [
        "seconds",
        "Mbit/s",
        "dBm/Hz",
        "",
    ]


def test_attributes_are_read_to_the_end_of_their_section():
    shared = "share one text, that goes on: over two lines."
    assert attributes(Example) == {"first": shared, "second": shared, "third": "a text of its own."}


def test_a_first_sentence_ends_where_it_ends():
    assert (
        first_sentence("The cell (Zhi et al. 2024,\neq. 3). More.\n\nElse.")
        == "The cell (Zhi et al. 2024, eq. 3)"
    )


def test_a_key_that_nobody_described_fails():
    assert described(Example, "third") == "a text of its own."
    with pytest.raises(UndescribedError, match=r"Example: its docstring says nothing of forgotten"):
        described(Example, "forgotten")


def rows(heading):
    """Of one section: key -> its other cells."""
    _, _, rest = run_toml_reference().partition(f"\n{heading}\n")
    lines = [line for line in rest.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    return {cells[0]: cells[1:] for line in lines for cells in [line.strip("| ").split(" | ")]}


def test_every_section_and_method_is_there():
    page = run_toml_reference()
    for section in ("run", "model", "data", "data.partition", "training", "round", "fleet", "fleet.wireless"):
        assert f"\n## [{section}]\n" in page
    for name in REGISTRY:
        assert f"\n### {name}\n" in page or f"`{name}`" in page
    assert set(RunSettings.__struct_fields__) >= {"compare", "paper"}
    assert "None" not in page  # TOML has none


def test_who_heeds_a_key():
    fleet, round_, data = rows("## [fleet]"), rows("## [round]"), rows("## [data]")
    assert (fleet["`boards`"][2], fleet["`ratios`"][2]) == ("simulation", "coordinator")
    assert (round_["`deadline_s`"][2], round_[r"`quorum` \*"][2]) == ("devices", "coordinator")
    assert (data["`mean`"][2], data["`class_names`"][2]) == ("devices", "coordinator")
    assert rows("## [run]")["`seed`"][2] == "devices"


def test_what_may_change_in_a_run_has_a_star():
    page = run_toml_reference()
    assert page.count(r"` \* |") == len(CHANGEABLE)
