"""Simulated devices that train on cards: `fleet.train_on`, `--device`."""

import pytest
from tests.helpers import card
from tests.helpers.errors import raises
from tests.helpers.nightly import sooner
from tests.tools.simulator.test_checkpoint import Said, Stop, stop
from tests.tools.simulator.test_simulate import BASE
from tests.tools.simulator.test_simulate import settings as simulated
from tests.tools.simulator.test_trainer_choice import play
from typer.testing import CliRunner

from fleetune.protocols.errors import ModelError, SettingError
from fleetune.protocols.settings.simulation import FleetSection
from fleetune.tools.cli import app
from fleetune.tools.simulator.engine import ALL_CORES, WORKERS_A_CARD, open_workers
from fleetune.tools.simulator.workers import worker_processes
from fleetune.tools.simulator.workers.worker_processes import WorkerProcesses

ONE = f"{card.NAME}:0"


def on(device, **sections):
    return simulated(**sections, fleet=BASE["fleet"] | {"train_on": device})


@pytest.mark.parametrize("method", sooner(["fedspu", "moon", "fjord", "kapc-bls"], kept=["fedspu", "fjord"]))
def test_a_run_on_a_card_is_the_processors(method, tmp_path):
    said, sections = Said(), {"method": {"name": method}}
    _, there = play(tmp_path / "there", on(ONE, **sections), observers=[said])
    assert said.lines == [f"devices train on {ONE} (of this test)"]
    assert there == play(tmp_path / "here", on("cpu", **sections))[1]


def test_a_stopped_one_goes_on_there(tmp_path):
    with pytest.raises(Stop):
        play(tmp_path / "b", on(ONE), on_round=stop)
    with pytest.raises(SettingError, match=r"fleet\.train_on"):
        play(tmp_path / "b", on("cpu"))
    run, found = play(tmp_path / "b", on(ONE))
    assert run.settings.fleet.train_on == ONE
    assert found == play(tmp_path / "a", on(ONE))[1]


def test_a_run_that_was_begun_with_a_card_which_is_gone(tmp_path, monkeypatch):
    with pytest.raises(Stop):
        play(tmp_path, on(ONE), on_round=stop)
    monkeypatch.setattr(card._Cards, "is_available", lambda _: False)
    with pytest.raises(ModelError, match=f"device {ONE}: torch .* finds no {card.NAME} here"):
        play(tmp_path, on(ONE))
    monkeypatch.undo()
    play(tmp_path, on(ONE))


@pytest.mark.parametrize(
    ("device", "more", "words"),
    [
        ("gpu", {}, ("gpu",)),
        (f"{card.NAME}:5", {}, (f"{card.NAME}:5",)),
        (f"cpu,{ONE}", {}, (f"cpu,{ONE}",)),
        (ONE, {"trainer": "onnx"}, (ONE, "fleet.trainer", '"onnx"')),
    ],
)
def test_what_cannot_be_leaves_nothing_behind(device, more, words, tmp_path):
    asked = simulated(fleet=BASE["fleet"] | {"train_on": device} | more)
    with raises(SettingError, "fleet.train_on", *words):
        play(tmp_path / "run", asked)
    assert not (tmp_path / "run").exists()


def test_on_a_ray_cluster_processors_train(tmp_path):
    with pytest.raises(SettingError, match=r"fleet\.train_on .*: on a Ray cluster only processors train"):
        play(tmp_path / "run", on(ONE), cluster="127.0.0.1:1")


def test_the_command_says_where_it_was_to_train(tmp_path):
    file = tmp_path / "run.toml"
    sections = {"run": 'name = "a"', "model": 'name = "mlp"', "method": 'name = "fedspu"'}
    sections |= {"data": 'source = "digits"', "fleet": "devices = 3"}
    file.write_text("\n".join(f"[{section}]\n{line}" for section, line in sections.items()))
    asked = ["run", str(file), "--runs", str(tmp_path / "runs"), "--workers", "0", "--device"]
    found = CliRunner().invoke(app, [*asked, "gpu"])
    assert found.exit_code == 2
    assert "fleet.train_on: device gpu is unknown to torch" in found.output
    assert CliRunner().invoke(app, [*asked, "cpu"]).exit_code == 0


def test_workers_share_cards_evenly():
    fleet = FleetSection(train_on="cuda:0,cuda:1")
    with WorkerProcesses(2) as pool:
        both = [pool.submit(_number_and_within) for _ in range(2)]
        assert {one.result() for one in both} == {(0, 0), (1, 1)}
    assert [fleet.trains_on(number) for number in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert FleetSection().trains_on(5) == "cpu"


def _number_and_within():
    with WorkerProcesses(1) as inner:
        return worker_processes.number(), inner.submit(worker_processes.number).result()


def test_a_few_workers_a_card_unless_it_is_said():
    with open_workers("local", None, None, 1) as found:
        assert found.workers == min(ALL_CORES, WORKERS_A_CARD)
    with open_workers("local", None, 9, 1) as found:
        assert found.workers == 9
