"""Which board a machine is taken for: by what boards' files say, and a new board is one file."""

import shutil

import msgspec
import pytest
from tests.helpers import boards
from tests.helpers.places import ROOT
from typer.testing import CliRunner

from fleetune import firmware_profiles
from fleetune.edge_agent.cli import app
from fleetune.edge_agent.probes import board_identity
from fleetune.firmware_profiles import load, names, recognised
from fleetune.firmware_profiles.recognition import Machine, Recognition, closest
from fleetune.firmware_profiles.schema import ProfileError, encode

MIB = 2**20


def machine(model=None, processor=None, android=False, mib=None):
    return Machine(model, processor, android, None if mib is None else mib * MIB)


def found(model=None, processor=None, android=False, mib=None, **known):
    """Which of `known` boards that machine is."""
    return closest(known, machine(model, processor, android, mib))


def test_every_shipped_board_is_recognised_by_each_of_its_signs():
    """None stands in the way of another."""
    shipped = firmware_profiles.recognitions()
    assert set(names()) - set(shipped) == {firmware_profiles.UNKNOWN}
    for name, signs in shipped.items():
        for model in signs.model or (None,):
            for processor in signs.processor or (None,):
                seen = machine(model and f"{model} Rev 9", processor, signs.android, signs.min_memory_mib)
                assert recognised(seen) == name


def test_a_machine_that_no_file_describes_is_generic():
    assert recognised(machine()) == firmware_profiles.UNKNOWN
    assert recognised(machine("Old Raspberry Pi 5", "Fast Intel(R) N100", mib=8000)) == "generic"


def test_every_sign_must_be_there():
    all_four = Recognition(("Tab",), ("Cortex-A53",), android=True, min_memory_mib=2000)
    assert found("Tab 3", "Cortex-A53", True, 2000, tab=all_four) == "tab"
    for lacking in (
        ("Pad 3", "Cortex-A53", True, 2000),
        (None, "Cortex-A53", True, 2000),
        ("Tab 3", None, True, 2000),
        ("Tab 3", "Cortex-A53", False, 2000),
        ("Tab 3", "Cortex-A53", True, 1999),
        ("Tab 3", "Cortex-A53", True, None),
    ):
        assert found(*lacking, tab=all_four) is None


def test_one_beginning_of_several_is_enough():
    signs = Recognition(model=("NanoPi R5", "FriendlyElec NanoPi R5"))
    assert found("FriendlyElec NanoPi R5S", r5=signs) == found("NanoPi R5C", r5=signs) == "r5"


@pytest.mark.parametrize(
    ("closer", "wider"),
    [
        (Recognition(model=("Board 4B",)), Recognition(model=("Board 4",))),
        (Recognition(model=("Board 4", "B")), Recognition(model=("Board",))),
        (Recognition(model=("B",)), Recognition(processor=("Cortex-A76",), android=True, min_memory_mib=9)),
        (Recognition(model=("B",), processor=("Cor",)), Recognition(model=("B",), android=True)),
        (Recognition(processor=("Cortex-A76",)), Recognition(processor=("Cortex",), android=True)),
        (Recognition(android=True), Recognition(min_memory_mib=4000)),
        (Recognition(model=("B",), min_memory_mib=4000), Recognition(model=("B",), min_memory_mib=2000)),
        (Recognition(model=("B",), min_memory_mib=1), Recognition(model=("B",))),
    ],
)
def test_the_closer_description_wins_whatever_it_is_called(closer, wider):
    seen = ("Board 4B", "Cortex-A76", True, 4000)
    assert found(*seen, a=closer, b=wider) == "a"
    assert found(*seen, a=wider, b=closer) == "b"


def test_of_two_alike_the_first_by_the_alphabet_wins():
    signs = Recognition(model=("Board",))
    assert found("Board 4", b=signs, a=signs, c=signs) == "a"


def test_a_new_board_is_one_file(tmp_path, monkeypatch):
    """The example of docs/boards.md, put beside the others: agents on such a board find it."""
    example = (ROOT / "docs/boards.md").read_text().split("```toml\n")[1].split("```")[0]
    files = shutil.copytree(ROOT / "firmware_profiles", tmp_path / "profiles")
    board = boards.FakeBoard({"sys/class/dmi/id/product_name": "Radxa X4\n"} | boards.memory(8000, 6000))
    board.files["proc/cpuinfo"] = "model name\t: Intel(R) N100\n"
    root = board.build(tmp_path / "root")
    assert board_identity.board_name(root, board.run) == "n100-gateway"
    monkeypatch.setattr(firmware_profiles, "_FILES", files)
    (files / "radxa-x4.toml").write_text(example)
    assert board_identity.board_name(root, board.run) == "radxa-x4"
    assert load("radxa-x4").title == "Radxa X4"
    assert "radxa-x4" in CliRunner().invoke(app, ["boards"]).stdout


def test_a_board_of_the_users_own_may_say_by_what_it_is_recognised(tmp_path):
    """Or not; for what is known of it, it makes no difference."""
    plain = encode(load("jetson-nano").profile)
    (tmp_path / "mine.toml").write_text(plain)
    without = firmware_profiles.load_file(tmp_path / "mine.toml")
    (tmp_path / "mine.toml").write_text(plain + "\n[recognise]\nandroid = true\n")
    assert firmware_profiles.load_file(tmp_path / "mine.toml") == without
    (tmp_path / "mine.toml").write_text(plain + "\n[recognise]\n")
    with pytest.raises(ProfileError, match="recognise: the table is empty"):
        firmware_profiles.load_file(tmp_path / "mine.toml")


def test_what_agents_store_of_a_board_says_nothing_of_it():
    """An agent's state holds its board's profile: an older agent goes on with it, a newer one has it anew."""
    stored = msgspec.to_builtins(load("phone-mid"))
    assert set(stored["profile"]) == {"title", "figures"}
