"""run.toml: what is right is read, what is wrong is named in one line."""

import pytest
from tests.helpers.errors import raises

from fleetune.protocols.errors import SettingError
from fleetune.protocols.settings.run_toml import REMOVED, parse_run, read_run

GOOD = """
[run]
name = "fashion"
rounds = 7
[model]
name = "mlp"
[method]
name = "fedspu"
early_stopping = true
[data]
partition = { kind = "dirichlet", alpha = 0.1 }
[fleet]
boards = { raspberry-pi-4b = 3 }
ratios = [0.2, 1.0]
"""


def written(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_a_good_file_is_read(tmp_path):
    settings = read_run(written(tmp_path, GOOD))
    assert settings.run.rounds == 7
    assert settings.method == {"name": "fedspu", "early_stopping": True}
    assert settings.data.partition.alpha == 0.1
    assert settings.fleet.ratios == (0.2, 1.0)


def test_changes_come_on_top(tmp_path):
    changes = ["run.rounds=3", "method.name=fedavg", "data.partition.alpha=0.5", 'run.name = "x"']
    settings = read_run(written(tmp_path, GOOD), changes)
    assert settings.run.rounds == 3
    assert settings.run.name == "x"
    assert settings.method["name"] == "fedavg"
    assert settings.data.partition.alpha == 0.5


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rounds = 7", "round = 7", "run.round: unknown key; did you mean `rounds`?"),
        ("[fleet]", "[fleets]", "fleets: unknown key; did you mean `fleet`?"),
        ("alpha = 0.1", "alhpa = 0.1", "data.partition.alhpa: unknown key; did you mean `alpha`?"),
        ("rounds = 7", "rounds = 0", "run.rounds: expected `int` >= 1"),
        ("rounds = 7", 'rounds = "7"', "run.rounds: invalid enum value '7'"),
        ("alpha = 0.1", "alpha = -1", "data.partition.alpha: expected `float` > 0"),
        ('name = "fashion"', 'name = "a b"', "run.name: expected `str` matching regex"),
        ("1.0]", "1.5]", "fleet.ratios[1]: expected `float` <= 1.0"),
        ('name = "fedspu"', "", "method.name is missing"),
        ('[model]\nname = "mlp"', "", "missing required field `model`"),
        ("[run]", "[run", "run.toml: "),
    ],
)
def test_a_wrong_file_gets_one_line_that_names_the_key(tmp_path, old, new, message):
    assert old in GOOD
    path = written(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(SettingError) as caught:
        read_run(path)
    text = str(caught.value)
    assert message in text
    assert text.startswith(str(path))
    assert "\n" not in text


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_setting_is_refused_by_its_name(tmp_path, key):
    section, _, name = key.partition(".")
    path = written(tmp_path, f"{GOOD}\n[{section}]\n{name} = 1\n")
    with raises(SettingError, str(path), key):
        read_run(path)


def test_a_setting_by_its_old_name_is_answered_with_the_new_one(tmp_path):
    path = written(tmp_path, GOOD.replace("rounds = 7", "rehearsal = true"))
    with pytest.raises(SettingError, match=r"run.rehearsal is called run.final_evaluation now$"):
        read_run(path)
    with pytest.raises(SettingError, match=r"run.rehearsal is called run.final_evaluation now$"):
        read_run(written(tmp_path, GOOD), ["run.rehearsal=false"])


def test_a_misspelt_key_is_told_the_name_of_today(tmp_path):
    path = written(tmp_path, GOOD.replace("rounds = 7", "final_evaluaton = true"))
    with pytest.raises(SettingError, match="did you mean `final_evaluation`"):
        read_run(path)


def test_a_missing_file_and_a_bad_change_are_named(tmp_path):
    with pytest.raises(SettingError, match="no such file"):
        read_run(tmp_path / "nowhere.toml")
    for change in ("rounds=3", "run.rounds", "run.name.x=1"):
        with pytest.raises(SettingError, match="--set"):
            read_run(written(tmp_path, GOOD), [change])


def test_an_empty_file_says_what_is_missing():
    with pytest.raises(SettingError, match="top level: object missing required field `run`"):
        parse_run({})
