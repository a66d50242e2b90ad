"""The tasks that a fleet can learn, one file each and one line here; their losses and scores."""

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
    """Return the score of that name among all tasks; None if there is none."""
    return next((one for task in TASKS.values() for one in task.scores if one.name == name), None)


def task_of(section: TaskSection) -> Task:
    """Return the task of a run's [task] section.

    Raises:
        SettingError: the section names a loss or a score that the task does not have.
    """
    return TASKS[section.kind](section)
