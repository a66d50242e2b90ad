"""What is counted of tasks as papers count them: each once, whenever it reaches its device."""

from tests.helpers.played_run import SPEC, PlayedRun

from fleetune.coordinator.rounds.events import Tick
from fleetune.coordinator.tasks.assignment import OutgoingTask

AFTER_THE_DEADLINE = 2000.0


class SlowLink(PlayedRun):
    """What device d is sent is on its way until somebody says that it is there."""

    def take(self, outcomes):
        sent = [one for one in outcomes if isinstance(one, OutgoingTask) and one.device == "d"]
        self.on_the_way = [*getattr(self, "on_the_way", ()), *((one, len(one.make())) for one in sent)]
        super().take([one for one in outcomes if one not in sent])

    def arrive(self, task, num_bytes):
        self.run.controller.note_delivered("d", task.transfer_key, num_bytes)
        return self.run.controller.ledger.of("d").paper_down


def test_a_task_that_arrives_when_its_round_has_closed_counts_as_it_does_in_bytes(tmp_path):
    played = SlowLink(tmp_path, "fedavg", "synchronous")
    played.play(end=0)
    for round_over in (AFTER_THE_DEADLINE, 2 * AFTER_THE_DEADLINE):
        for device in "abc":
            played.step(device, round_over - 1.0)
        played.take(played.run.controller.handle(Tick(), round_over))
    whole, (first, *_, last) = 4 * SPEC.num_parameters, played.on_the_way
    assert (first[0].transfer_key.round, last[0].transfer_key.round) == (1, 3)
    assert played.arrive(*first) == whole
    assert played.arrive(*first) == whole, "it was offered again"
    assert played.arrive(*last) == 2 * whole
    traffic = played.run.controller.ledger.of("d")
    assert (traffic.tasks, traffic.down) == (2, first[1] + last[1])
    played.close()
