"""Profiles of boards: those we ship, those of users, and what bad ones get."""

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.helpers.boards import estimates
from tests.helpers.places import ROOT
from typer.testing import CliRunner

from fleetune import firmware_profiles
from fleetune.edge_agent.cli import app
from fleetune.edge_agent.probes.board_profile import board_named
from fleetune.firmware_profiles.recognition import Recognition
from fleetune.firmware_profiles.schema import (
    ESTIMATE,
    MEASURED,
    Figure,
    Figures,
    Profile,
    ProfileError,
    decode,
    encode,
    stated,
)
from fleetune.protocols.errors import SettingError
from fleetune.tools.links.presets import PRESETS

BOARDS = (
    "coral-dev-board",
    "generic",
    "jetson-nano",
    "jetson-orin-nano",
    "n100-gateway",
    "phone-low",
    "phone-mid",
    "raspberry-pi-3b-plus",
    "raspberry-pi-4b",
    "raspberry-pi-5",
    "raspberry-pi-zero-2w",
)
GOOD = encode(firmware_profiles.load("phone-mid").profile)


def with_value(key, value):
    """The text of a profile with another value, as TOML, at one key; None: without the key."""
    lines = [line for line in GOOD.splitlines() if not line.startswith(f"{key} = ")]
    assert len(lines) == len(GOOD.splitlines()) - 1
    return "\n".join(
        lines if value is None else [*lines, f'{key} = {{ value = {value}, source = "estimate" }}']
    )


def recognised_by(table):
    """The text of a profile with a table `[recognise]`."""
    return f"{GOOD}\n[recognise]\n{table}\n"


def problem_of(text):
    with pytest.raises(ProfileError) as caught:
        decode(text, "my.toml")
    problem = str(caught.value)
    assert problem.startswith("my.toml")
    assert problem.splitlines() == [problem]
    return problem


def test_all_boards_are_there():
    assert set(BOARDS) <= set(firmware_profiles.names())


@pytest.mark.parametrize("name", firmware_profiles.names())
def test_a_shipped_board_is_valid_and_tells_where_its_figures_are_from(name):
    board = firmware_profiles.load(name)
    assert board.name == name
    for key, figure in stated(board.profile.figures).items():
        if figure.source == ESTIMATE:
            assert figure.note, f"{name}: how was {key} estimated?"
        else:
            assert figure.source.startswith("http"), f"{name}: {key} was not measured by its reader"
    assert set(board.links) <= set(PRESETS)


@pytest.mark.parametrize("name", BOARDS)
def test_of_these_boards_only_phones_have_a_battery(name):
    assert (firmware_profiles.load(name).battery_wh is None) == (not name.startswith("phone"))


def test_a_board_is_its_figures_in_bytes_and_bits():
    pi = firmware_profiles.load("raspberry-pi-zero-2w")
    assert (pi.cores, pi.memory_bytes, pi.max_celsius) == (4, 512 * 2**20, 80)
    assert (pi.uplink_bps, pi.downlink_bps) == (5e6, 20e6)
    assert pi.idle_w < pi.train_w
    assert pi.sensors == ("thermal", "throttled")
    assert "training_gflops" in estimates(pi)
    assert "cores" not in estimates(pi)


def test_an_unknown_board_is_told_those_there_are():
    with pytest.raises(KeyError, match="no board 'raspberry-pi-6'; known: coral-dev-board, generic"):
        firmware_profiles.load("raspberry-pi-6")


@pytest.mark.parametrize("key", [key for key in Figures.__struct_fields__ if key != "battery_wh"])
def test_a_missing_figure_is_named(key):
    assert f"my.toml: figures.{key} is missing; see docs/boards.md" in problem_of(with_value(key, None))


def test_a_board_without_a_battery_leaves_it_out():
    assert decode(with_value("battery_wh", None), "my.toml").figures.battery_wh is None


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("cores", "0", "figures.cores.value: expected int >= 1"),
        ("cores", "2.5", "figures.cores.value: expected int, got float"),
        ("cores", "true", "figures.cores.value: expected int, got bool"),
        ("cores", '"four"', "figures.cores.value: expected int, got str"),
        ("memory_mib", "8", "figures.memory_mib.value: expected int >= 16"),
        ("memory_mib", "8589934592", "figures.memory_mib.value: expected int <= 4194304"),
        ("training_gflops", "0", "figures.training_gflops.value: expected float > 0"),
        ("training_gflops", "nan", "figures.training_gflops.value: expected float > 0"),
        ("training_gflops", "inf", "figures.training_gflops.value: expected float <= 100000"),
        ("uplink_mbps", "-1", "figures.uplink_mbps.value: expected float > 0"),
        ("idle_w", "2", "figures: train_w is 1.4, less than idle_w = 2"),
        ("transmit_w", "0.1", "figures: transmit_w is 0.1, less than idle_w = 0.2"),
        ("train_w", "5000", "figures.train_w.value: expected float <= 2000"),
        ("battery_wh", "0", "figures.battery_wh.value: expected float > 0"),
        ("max_celsius", "358", "figures.max_celsius.value: expected float <= 150"),
        ("max_celsius", "nan", "figures.max_celsius.value: expected float >= 20"),
        ("sensors", '["nose"]', "figures.sensors.value[0]: invalid enum value 'nose'"),
        ("links", '["5g"]', "figures.links.value[0]: invalid enum value '5g'"),
    ],
)
def test_an_impossible_figure_is_named_with_its_range(key, value, said):
    assert said in problem_of(with_value(key, value))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "title is missing"),
        ('title = ""', "title: expected str of length >= 1"),
        ("cores = 4", "is unknown"),
        ('title = "x', "my.toml is not valid TOML"),
        (GOOD + 'colour = { value = 1, source = "estimate" }', "figures.colour is unknown"),
        (GOOD + '"a\\nb" = 1', "figures.a b is unknown"),
        (
            with_value("cores", '4, source = "a friend" }#'),
            "figures.cores: source is 'a friend'; it must be a link",
        ),
        (with_value("cores", "4 }#"), "figures.cores.source is missing"),
        (
            recognised_by(""),
            "recognise: the table is empty; give model, processor, android or min_memory_mib",
        ),
        (recognised_by("android = false"), "recognise: the table is empty"),
        (recognised_by("model = []"), "recognise: the table is empty"),
        (recognised_by('model = "Pi"'), "recognise.model: expected array, got str"),
        (recognised_by('model = [""]'), "recognise.model[0]: expected str of length >= 1"),
        (recognised_by("processor = [4]"), "recognise.processor[0]: expected str, got int"),
        (recognised_by('android = "yes"'), "recognise.android: expected bool, got str"),
        (recognised_by("min_memory_mib = 0"), "recognise.min_memory_mib: expected int >= 1"),
        (recognised_by('serial = "1"'), "recognise.serial is unknown"),
    ],
)
def test_a_wrong_file_is_told_in_one_line(text, said):
    assert said in problem_of(text)


def test_the_documents_own_board_is_valid():
    page = (ROOT / "docs/boards.md").read_text()
    example = page.split("```toml\n")[1].split("```")[0]
    assert decode(example, "docs/boards.md").title == "Radxa X4"
    for key in (*Figures.__struct_fields__, *Recognition.__struct_fields__):
        assert f"`{key}`" in page


@given(st.text() | st.text().map(lambda text: GOOD.replace("19.3", text)))
def test_garbage_is_refused_in_one_line_or_valid(text):
    try:
        profile = decode(text, "my.toml")
    except ProfileError as problem:
        said = str(problem)
    else:
        said = encode(profile).splitlines()[0]
    assert len(said.splitlines()) == 1


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "binary.toml").write_bytes(b"title = '\xff'")
    (tmp_path / "generic.toml").write_text(GOOD)
    for name, said in [
        ("gone.toml", "cannot be read: No such file"),
        ("", "cannot be read: Is a directory"),
        ("binary.toml", "not text in UTF-8"),
        ("generic.toml", "claims no capability; rename the file"),
    ]:
        with pytest.raises(ProfileError, match=said):
            firmware_profiles.load_file(tmp_path / name)


MINE = Profile(
    'Radxa "X4" \\ 日本\x7f\n\t',
    replace(
        firmware_profiles.load("n100-gateway").profile.figures,
        cores=Figure(3, MEASURED),
        training_gflops=Figure(17.25, MEASURED, "cnn-kapc, 3 s"),
        idle_w=Figure(1e-05, "https://example.org/a?b=c#d"),
        battery_wh=Figure(50, ESTIMATE),
        sensors=Figure((), MEASURED),
    ),
)


def test_what_was_saved_is_loaded_again(tmp_path):
    path = tmp_path / "my-board.toml"
    firmware_profiles.save(path, firmware_profiles.load("jetson-nano").profile)
    firmware_profiles.save(path, MINE)
    board = firmware_profiles.load_file(path)
    assert board.profile == MINE
    assert (board.name, board.title, board.cores, board.battery_wh) == ("my-board", MINE.title, 3, 50)
    assert "cores" not in estimates(board)
    assert list(tmp_path.iterdir()) == [path]


@given(
    st.builds(
        Figure, st.floats(1e-300, 1e5), st.just(ESTIMATE), st.text(st.characters(exclude_categories=["Cs"]))
    )
)
def test_every_figure_survives_the_file(figure):
    profile = replace(MINE, figures=replace(MINE.figures, training_gflops=figure))
    assert decode(encode(profile), "my.toml") == profile


def test_an_impossible_figure_is_not_saved(tmp_path):
    path = tmp_path / "my-board.toml"
    firmware_profiles.save(path, MINE)
    for wrong in Figure(float("nan"), MEASURED), Figure(0.0, MEASURED), Figure("fast", MEASURED):
        with pytest.raises(ProfileError, match=r"my-board\.toml"):
            firmware_profiles.save(path, replace(MINE, figures=replace(MINE.figures, training_gflops=wrong)))
    assert firmware_profiles.load_file(path).profile == MINE


def test_where_nothing_can_be_written_nothing_is_left(tmp_path):
    (tmp_path / "taken.toml").mkdir()
    for path, said in [
        (tmp_path / "gone" / "a.toml", "No such file"),
        (tmp_path / "taken.toml", "Is a directory"),
    ]:
        with pytest.raises(ProfileError, match=f"cannot be written: {said}"):
            firmware_profiles.save(path, MINE)
    assert list(tmp_path.iterdir()) == [tmp_path / "taken.toml"]


def test_a_disk_that_fills_up_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "my-board.toml"
    firmware_profiles.save(path, MINE)

    def write_half(self, text, encoding):
        self.write_bytes(text.encode(encoding)[: len(text) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(ProfileError, match="cannot be written: No space left on device"):
        firmware_profiles.save(path, replace(MINE, title="another"))
    assert firmware_profiles.load_file(path).profile == MINE
    assert list(tmp_path.iterdir()) == [path]


def test_a_users_own_file_is_a_board(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    firmware_profiles.save(Path("mine.toml"), MINE)
    assert board_named("mine.toml").cores == board_named("./mine.toml").cores == 3
    with pytest.raises(SettingError, match=r"^board no\.toml cannot be read"):
        board_named("no.toml")


def boards(*arguments):
    return CliRunner().invoke(app, ["boards", *arguments])


def test_the_table_shows_every_board_and_which_figures_are_estimates():
    shown = boards()
    assert shown.exit_code == 0
    lines = {line.split()[0]: line.split() for line in shown.stdout.splitlines() if line.strip()}
    assert set(BOARDS) <= set(lines)
    assert lines["raspberry-pi-4b"] == ["raspberry-pi-4b", "4", "4", "~4", "~20/~80", "2.7/~4.2", "80"]
    assert "~ marks an estimate" in shown.stdout


def test_one_board_shows_every_source(tmp_path):
    shown = boards("raspberry-pi-4b").stdout
    assert "idle_w           2.7         https://www.pidramble.com/wiki/benchmarks/power-consumption" in shown
    assert "training_gflops  4.0         estimate (" in shown
    firmware_profiles.save(tmp_path / "mine.toml", MINE)
    mine = boards(str(tmp_path / "mine.toml")).stdout
    assert "training_gflops  17.25       measured (cnn-kapc, 3 s)" in mine
    assert "sensors          none        measured" in mine


@pytest.mark.parametrize(
    "command", [["boards"], ["run", "--fleet=f", "--broker=h:1", "--data=digits", "--board"]]
)
def test_a_wrong_board_is_one_line_and_exit_code_2(tmp_path, command):
    path = tmp_path / "mine.toml"
    path.write_text(with_value("train_w", None))
    shown = CliRunner().invoke(app, [*command, str(path)])
    assert shown.exit_code == 2
    assert shown.stderr == (
        f'edge-agent: {path}: figures.train_w is missing; see docs/boards.md, or use the board "generic"\n'
    )
