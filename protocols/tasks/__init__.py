"""What a fleet learns: tasks by kind, one file each, one line here; their losses in numpy and in torch, and
their scores.
"""

from fleetune.protocols.settings.task import TaskSection
from fleetune.protocols.tasks.classification import Classification
from fleetune.protocols.tasks.forecast import Forecast
from fleetune.protocols.tasks.multi_label import MultiLabel
from fleetune.protocols.tasks.reconstruction import Reconstruction
from fleetune.protocols.tasks.regression import Regression
from fleetune.protocols.tasks.scores import Score
from fleetune.protocols.tasks.task import Task

TASKS: dict[str, type[Task]] = {
    one.kind: one for one in (Classification, MultiLabel, Regression, Forecast, Reconstruction)
}
CLASSIFICATION = Classification(TaskSection())


def score_named(name: str) -> Score | None:
    """A score of any task; None: no task has it."""
    return next((one for task in TASKS.values() for one in task.scores if one.name == name), None)


def task_of(section: TaskSection) -> Task:
    """The task that a run's [task] asks for.

    Raises:
        SettingError: it asks for a loss or a score that the task does not have.
    """
    return TASKS[section.kind](section)
