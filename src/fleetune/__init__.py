"""Fleetune: on-device training for fleets of edge devices.

The public interface is `__all__`, `errors` and `bounds`. Everything else may change from one release to the
next. Each public name is imported at its first use, so heavy packages are loaded only when they are needed.

A method of your own (docs/add-a-method.md):
    Base classes: Method, ModelAveraging, SubModels, PersonalTargets.
    Types of the base classes: PersonalModel, SharedModel, Task, Update.
    Arguments and results of `plan` and `work`: Round, Budget, Trainer, FitPlan, Pull, Contrast, Distillation,
    Fit, lazily.
    Costs: Choice, Cost, DeviceReport, estimate_bytes.
    The model: ModelSpec, TensorSpec, FlatArray, MaskArray.
    Transferred values: Patch, CoveredMean, Selection (one of Everything, Layers, Neurons, ChosenNeurons,
    Entries, DrawnEntries).
    Random draws: Key.
    Diagnostics of a method: Diagnostic.
    Types that bound a peer's values: `bounds`.

An agent in a program of yours (docs/library.md):
    Agent takes samples and returns a Prediction of the device's own model; AgentState describes its state.

Runs from Python:
    simulate runs a run.toml on a virtual clock and returns a Result with data frames. read_result reads the
    same from any run's folder. compare runs several methods over seeds and returns a ComparisonResult. sweep
    runs every combination of some settings and returns a SweepResult. read_run returns the RunSettings of a
    run.toml, read_summary the Summary of a run. load_data returns the Dataset of a `data.source`, load_board
    the Board of a firmware profile, board_names their names.

Every error is a FleetuneError with a message of one line; its subclasses are in `errors`.

The folders next to this file are links to the folders at the top of the repository; read and edit them there.
An installed wheel contains copies of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fleetune.coordinator.metrics.summary import Summary as Summary
    from fleetune.coordinator.metrics.summary import read_summary as read_summary
    from fleetune.edge_agent.datasets.dataset import Dataset as Dataset
    from fleetune.edge_agent.datasets.sources import load as load_data
    from fleetune.edge_agent.library.agent import Agent as Agent
    from fleetune.edge_agent.library.prediction import Prediction as Prediction
    from fleetune.edge_agent.library.state import AgentState as AgentState
    from fleetune.firmware_profiles import Board as Board
    from fleetune.firmware_profiles import load as load_board
    from fleetune.firmware_profiles import names as board_names
    from fleetune.protocols import bounds as bounds
    from fleetune.protocols import errors as errors
    from fleetune.protocols.errors import FleetuneError as FleetuneError
    from fleetune.protocols.method.averaging import ModelAveraging as ModelAveraging
    from fleetune.protocols.method.averaging import PersonalModel as PersonalModel
    from fleetune.protocols.method.averaging import SharedModel as SharedModel
    from fleetune.protocols.method.averaging import Task as Task
    from fleetune.protocols.method.averaging import Update as Update
    from fleetune.protocols.method.choice import Budget as Budget
    from fleetune.protocols.method.choice import Choice as Choice
    from fleetune.protocols.method.choice import Cost as Cost
    from fleetune.protocols.method.choice import DeviceReport as DeviceReport
    from fleetune.protocols.method.diagnostics import Diagnostic as Diagnostic
    from fleetune.protocols.method.method import Method as Method
    from fleetune.protocols.method.method import Round as Round
    from fleetune.protocols.method.method import lazily as lazily
    from fleetune.protocols.method.submodels import SubModels as SubModels
    from fleetune.protocols.method.targets import PersonalTargets as PersonalTargets
    from fleetune.protocols.method.trainer import Fit as Fit
    from fleetune.protocols.method.trainer import FitPlan as FitPlan
    from fleetune.protocols.method.trainer import Pull as Pull
    from fleetune.protocols.method.trainer import Trainer as Trainer
    from fleetune.protocols.model.loss_terms import Contrast as Contrast
    from fleetune.protocols.model.loss_terms import Distillation as Distillation
    from fleetune.protocols.model.spec import FlatArray as FlatArray
    from fleetune.protocols.model.spec import MaskArray as MaskArray
    from fleetune.protocols.model.spec import ModelSpec as ModelSpec
    from fleetune.protocols.model.spec import TensorSpec as TensorSpec
    from fleetune.protocols.randomness import Key as Key
    from fleetune.protocols.settings.run_settings import RunSettings as RunSettings
    from fleetune.protocols.settings.run_toml import read_run as read_run
    from fleetune.protocols.update.codec import estimate_bytes as estimate_bytes
    from fleetune.protocols.update.combine import CoveredMean as CoveredMean
    from fleetune.protocols.update.patch import Patch as Patch
    from fleetune.protocols.update.selection import ChosenNeurons as ChosenNeurons
    from fleetune.protocols.update.selection import DrawnEntries as DrawnEntries
    from fleetune.protocols.update.selection import Entries as Entries
    from fleetune.protocols.update.selection import Everything as Everything
    from fleetune.protocols.update.selection import Layers as Layers
    from fleetune.protocols.update.selection import Neurons as Neurons
    from fleetune.protocols.update.selection import Selection as Selection
    from fleetune.protocols.version import VERSION as __version__  # noqa: N811
    from fleetune.tools.research.compare import ComparisonResult as ComparisonResult
    from fleetune.tools.research.compare import compare as compare
    from fleetune.tools.research.result import Result as Result
    from fleetune.tools.research.result import read_result as read_result
    from fleetune.tools.research.simulate import simulate as simulate
    from fleetune.tools.research.sweep import SweepResult as SweepResult
    from fleetune.tools.research.sweep import sweep as sweep

__all__ = [
    "Agent",
    "AgentState",
    "Board",
    "Budget",
    "Choice",
    "ChosenNeurons",
    "ComparisonResult",
    "Contrast",
    "Cost",
    "CoveredMean",
    "Dataset",
    "DeviceReport",
    "Diagnostic",
    "Distillation",
    "DrawnEntries",
    "Entries",
    "Everything",
    "Fit",
    "FitPlan",
    "FlatArray",
    "FleetuneError",
    "Key",
    "Layers",
    "MaskArray",
    "Method",
    "ModelAveraging",
    "ModelSpec",
    "Neurons",
    "Patch",
    "PersonalModel",
    "PersonalTargets",
    "Prediction",
    "Pull",
    "Result",
    "Round",
    "RunSettings",
    "Selection",
    "SharedModel",
    "SubModels",
    "Summary",
    "SweepResult",
    "Task",
    "TensorSpec",
    "Trainer",
    "Update",
    "__version__",
    "board_names",
    "bounds",
    "compare",
    "errors",
    "estimate_bytes",
    "lazily",
    "load_board",
    "load_data",
    "read_result",
    "read_run",
    "read_summary",
    "simulate",
    "sweep",
]

_HOMES = {  # public names by module; `name=original` where the module itself uses another name
    "fleetune.coordinator.metrics.summary": "Summary read_summary",
    "fleetune.edge_agent.datasets.dataset": "Dataset",
    "fleetune.edge_agent.datasets.sources": "load_data=load",
    "fleetune.edge_agent.library.agent": "Agent",
    "fleetune.edge_agent.library.prediction": "Prediction",
    "fleetune.edge_agent.library.state": "AgentState",
    "fleetune.firmware_profiles": "Board load_board=load board_names=names",
    "fleetune.protocols": "bounds errors",
    "fleetune.protocols.errors": "FleetuneError",
    "fleetune.protocols.model.loss_terms": "Contrast Distillation",
    "fleetune.protocols.model.spec": "FlatArray MaskArray ModelSpec TensorSpec",
    "fleetune.protocols.randomness": "Key",
    "fleetune.protocols.settings.run_toml": "read_run",
    "fleetune.protocols.settings.run_settings": "RunSettings",
    "fleetune.protocols.method.averaging": "ModelAveraging PersonalModel SharedModel Task Update",
    "fleetune.protocols.method.choice": "Budget Choice Cost DeviceReport",
    "fleetune.protocols.method.diagnostics": "Diagnostic",
    "fleetune.protocols.method.method": "Method Round lazily",
    "fleetune.protocols.method.submodels": "SubModels",
    "fleetune.protocols.method.targets": "PersonalTargets",
    "fleetune.protocols.method.trainer": "Fit FitPlan Pull Trainer",
    "fleetune.protocols.update.codec": "estimate_bytes",
    "fleetune.protocols.update.combine": "CoveredMean",
    "fleetune.protocols.update.patch": "Patch",
    "fleetune.protocols.update.selection": (
        "ChosenNeurons DrawnEntries Entries Everything Layers Neurons Selection"
    ),
    "fleetune.protocols.version": "__version__=VERSION",
    "fleetune.tools.research.compare": "ComparisonResult compare",
    "fleetune.tools.research.result": "Result read_result",
    "fleetune.tools.research.simulate": "simulate",
    "fleetune.tools.research.sweep": "SweepResult sweep",
}
_PLACES = {
    word.partition("=")[0]: (module, word.rpartition("=")[2])
    for module, words in _HOMES.items()
    for word in words.split()
}
_MODULES = ("bounds", "errors")


def __getattr__(name: str) -> object:
    """Import and return a public name at its first use."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, theirs = _PLACES[name]
    found = globals()[name] = (
        import_module(f"{module}.{theirs}") if name in _MODULES else getattr(import_module(module), theirs)
    )
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
