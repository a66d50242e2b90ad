"""A task goes along with its offer when it is new, and alone is offered when its device may have it."""

from tests.helpers.talk import Coordinating, run_settings


def channels(talk, device):
    """Where the coordinator spoke to a device since the last time."""
    return [topic.rpartition("/")[2] for topic, _ in talk.take(device)]


def begun(folder):
    talk = Coordinating.of(folder, run_settings(start_with=2))
    talk.greet("a")
    talk.take("a")
    talk.greet("b")
    return talk


def test_a_new_task_goes_right_behind_its_offer(tmp_path):
    talk = begun(tmp_path)
    assert channels(talk, "a") == ["down", "task"]
    talk.close()


def test_a_device_that_comes_back_is_asked_what_it_has(tmp_path):
    talk = begun(tmp_path)
    talk.take("a")
    talk.greet("a")
    assert "task" not in channels(talk, "a")
    talk.close()


def test_a_coordinator_that_comes_back_asks_what_its_devices_have(tmp_path):
    begun(tmp_path).close()
    talk = Coordinating.of(tmp_path, run_settings(start_with=2))
    talk.greet("a")
    assert talk.run.resumed
    assert "down" in (found := channels(talk, "a"))
    assert "task" not in found
    talk.close()
