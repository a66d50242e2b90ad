"""TensorBoard reads what is written: every round once, whatever was stopped when."""

import pytest
from tests.coordinator.trackers.test_follow import Noting, simulate

pytest.importorskip("tensorboard")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    monkeypatch.setattr("fleetune.coordinator.reports.report.can_paint", lambda: False)


def read(folder):
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def points(folder, tag="score/accuracy_after"):
    return {event.step: event.value for event in read(folder).Scalars(tag)}


class Stop(Exception):
    pass


def stop_after(number):
    def hear(row):
        if row["round"] == number:
            raise Stop

    return hear


def test_what_it_shows_is_what_the_run_had(tmp_path):
    result = simulate(tmp_path, "tensorboard")
    found = read(tmp_path / "small")
    assert points(tmp_path / "small") == pytest.approx(result.rounds["accuracy_after"].to_dict())
    assert points(tmp_path / "small", "cost/bytes_up") == pytest.approx(result.rounds["bytes_up"].to_dict())
    (mean,) = found.Scalars("summary/accuracy_personal_mean")
    assert (mean.step, mean.value) == (4, pytest.approx(result.summary.accuracy.personal_mean))
    (text,) = found.Tensors("settings")
    assert "| method.name | fedspu |" in text.tensor_proto.string_val[0].decode()
    assert "_hparams_/session_start_info" in found.Tags()["tensors"]


def test_a_run_that_goes_on_has_every_point_once(tmp_path):
    folder = tmp_path / "small"
    for number in (1, 3):
        with pytest.raises(Stop):
            simulate(tmp_path, "tensorboard", on_round=stop_after(number))
        assert list(points(folder)) == list(range(1, number + 1))
    result = simulate(tmp_path, "tensorboard")
    assert len(list(folder.glob("events.out.tfevents.*"))) == 1
    assert points(folder) == pytest.approx(result.rounds["accuracy_after"].to_dict())
    assert [event.step for event in read(folder).Scalars("score/accuracy_after")] == [1, 2, 3, 4]


def test_a_round_that_is_taken_back_does_not_count(tmp_path):
    from fleetune.coordinator.trackers.tensorboard import TensorBoard
    from fleetune.coordinator.trackers.tracker import RoundFigures

    noting = Noting()
    simulate(tmp_path, noting, rounds=1)
    board = TensorBoard(noting.runs[0])
    for number, value in [(1, 0.1), (2, 0.9), (2, 0.2)]:
        board.hear(RoundFigures(number, {"score/accuracy_after": value}))
    board.close()
    assert points(tmp_path / "small") == pytest.approx({1: 0.1, 2: 0.2})


def test_an_open_run_keeps_what_it_let_go_of(tmp_path):
    from fleetune.coordinator.trackers.tensorboard import TensorBoard
    from fleetune.coordinator.trackers.tracker import RoundFigures

    noting = Noting()
    simulate(tmp_path, noting, rounds=1)
    run, told = noting.runs[0], [RoundFigures(n, {"score/accuracy_after": n / 10}) for n in range(1, 6)]
    board = TensorBoard(run)
    for one in told[:4]:
        board.hear(one)
    board.close()
    board = TensorBoard(type(run)(**{**vars(run), "before": tuple(told[2:4])}))
    board.hear(told[4])
    board.close()
    assert [event.step for event in read(tmp_path / "small").Scalars("score/accuracy_after")] == [
        1,
        2,
        3,
        4,
        5,
    ]
