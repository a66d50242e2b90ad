"""Who is compared, and the runs that this takes: contenders, each with several seeds."""

import dataclasses
import difflib
import fnmatch
import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from fleetune.protocols.errors import SettingError
from fleetune.protocols.methods import REGISTRY, from_section, with_defaults_of_run
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.settings.rate_schedule import with_schedule_of_run
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.run_toml import settings_of
from fleetune.protocols.settings.user_sources import Sources, user_sources
from fleetune.protocols.tasks.scores import Score
from fleetune.tools.compare.cells import Cell
from fleetune.tools.compare.comparison import Contender
from fleetune.tools.simulator.caller_samples import NO_CALLER_SAMPLES, CallerSamples
from fleetune.tools.simulator.simulated_fleet import with_group_devices

YARDSTICKS = ("local-only", "fedavg")
OF_OTHER_SECTIONS = {
    "ratios": "fleet.ratios",
    "up": "encoding.up",
    "down": "encoding.down",
    "minimise": "objective.minimise",
}
"""Keys that a [compare.LABEL] may have beside its method's, and whose they are."""
LONGEST_NAME = 80  # of a contender's folder
Give = Callable[[RunSettings], CallerSamples]  # of the run's settings, its seed among them


def nothing_given(_: RunSettings) -> CallerSamples:
    """All is as [data] says."""
    return NO_CALLER_SAMPLES


def contenders_of(settings: RunSettings, labels: Sequence[str]) -> list[Contender]:
    """Who is compared: a method with the settings that [method] or [compare.LABEL] has for it.

    Raises:
        SettingError: no label, one twice, or one that is neither a method nor a [compare.LABEL].
    """
    if not all(labels) or not labels:
        raise SettingError("--methods: name at least one, e.g. --methods local-only,fedavg,fedspu")
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise SettingError(f"--methods: {twice} stands there twice")
    return [_contender(settings, label) for label in labels]


def labels_of(settings: RunSettings, methods: str | None) -> list[str]:
    """Whom `--methods` means.

    Args:
        settings: of the run file.
        methods: comma-separated labels, or patterns (`kapc*`) of what [compare] has and of methods; `all`:
            every method there is, and what [compare] has; None: the yardsticks, the file's own method, and
            what [compare] has.

    Raises:
        SettingError: a pattern fits nothing.
    """
    if methods not in (None, "all"):
        return _expanded(
            [label.strip() for label in methods.split(",")], [*settings.compare, *sorted(REGISTRY)]
        )
    named = sorted(REGISTRY) if methods else [settings.method["name"]]
    return list(dict.fromkeys([*YARDSTICKS, *named, *settings.compare]))


def _expanded(asked: Sequence[str], known: Sequence[str]) -> list[str]:
    """With every pattern replaced by the known labels that it fits and nobody named before it."""
    labels: list[str] = []
    for label in asked:
        if not set(label) & set("*?["):
            labels.append(label)
            continue
        fitting = list(dict.fromkeys(fnmatch.filter(known, label)))
        if not fitting:
            raise SettingError(f"--methods: nothing fits {label!r}; known: {', '.join(dict.fromkeys(known))}")
        labels += [one for one in fitting if one not in labels]
    return labels


def cells_of(
    settings: RunSettings,
    contenders: Sequence[Contender],
    seeds: int | Sequence[int],
    folder: Path,
    give: Give = nothing_given,
) -> list[Cell]:
    """A run for each contender and seed, all contenders with the first seed first."""
    cells = []
    sources: dict[str, Sources] = {}
    for seed in seeds_of(settings, seeds):
        of_seed: dict[str, Cell] = {}
        seeded = replace(settings, run=replace(settings.run, seed=seed), compare={})
        given = give(seeded)
        seeded = given.named_in(seeded)
        for one in contenders:
            played = varied(seeded, one)
            if not played.fleet.devices:
                played = with_group_devices(played, given.samples(played))
            played = replace(
                played,
                method=with_defaults_of_run(
                    played.method, played.run.last_round, time_counts=played.time_counts
                ),
                training=with_schedule_of_run(played.training, played.run.last_round),
            )
            kept_in = folder / folder_name(one.label) / f"seed-{seed}"
            if one.label not in sources:
                sources[one.label] = user_sources(played)
            of_seed[one.label] = Cell(
                one.label, played, kept_in, folder.parent, given, sources=sources[one.label]
            )
        for one in contenders:
            within = tuple(of_seed[label] for label in one.within)
            cells.append(dataclasses.replace(of_seed[one.label], within=within))
    return cells


def varied(settings: RunSettings, contender: Contender) -> RunSettings:
    """The file's settings as a contender has them.

    Raises:
        SettingError: it has none that are like this.
    """
    own = replace(settings, method=dict(contender.method))
    try:
        return settings_of(own, contender.changes) if contender.changes else own
    except SettingError as problem:
        raise SettingError(f"{contender.label}: {problem}") from None


def folder_name(label: str) -> str:
    """Of a contender's runs; any two labels have two."""
    name = label.replace(":", "-").replace(", ", ",")
    plain = re.sub(r"[^\w.=,+-]", "_", name)
    if plain == name and len(name) <= LONGEST_NAME:
        return name
    return f"{plain[:LONGEST_NAME]}-{hashlib.blake2b(label.encode(), digest_size=4).hexdigest()}"


def seeds_of(settings: RunSettings, seeds: int | Sequence[int]) -> Sequence[int]:
    """So many from `run.seed` on, or these.

    Raises:
        SettingError: none, or one twice.
    """
    if isinstance(seeds, int):
        if seeds < 1:
            raise SettingError(f"--seeds {seeds}: at least 1")
        return range(settings.run.seed, settings.run.seed + seeds)
    if not seeds or len(set(seeds)) < len(seeds):
        raise SettingError(f"--seeds {list(seeds)}: name at least one, and none twice")
    return seeds


def check_target(target: float | None, score: Score) -> None:
    if target is not None and score.share and not 0 < target < 1:
        raise SettingError(f"--target {target:g}: {score.title} is between 0 and 1, e.g. 0.9")


def _contender(settings: RunSettings, label: str) -> Contender:
    section = _method_section(settings, label)
    changes = {path: section.pop(key) for key, path in OF_OTHER_SECTIONS.items() if key in section}
    contender = Contender(label, section, changes)
    try:
        varied(settings, contender)
    except SettingError as problem:
        raise SettingError(f"compare.{problem}") from None
    return contender


def _method_section(settings: RunSettings, label: str) -> dict[str, object]:
    own = settings.method if settings.method["name"] == label else {}
    section = {**own, "name": label, **settings.compare.get(label, {})}
    name = section["name"]
    if not isinstance(name, str) or (name not in REGISTRY and ":" not in name):
        known = [*REGISTRY, *settings.compare]
        near = difflib.get_close_matches(str(name), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        raise SettingError(f"--methods: no method {name!r}; {hint}")
    return section


def check_methods(cells: Sequence[Cell]) -> None:
    """Make the method of each contender once: a wrong setting of the last is found before the first has run
    for hours.

    Raises:
        SettingError: a method does not take its settings, or no model can be made.
    """
    from fleetune.coordinator.run.enrolment import prepare
    from fleetune.tools.simulator.runner import with_model_shape
    from fleetune.tools.simulator.simulated_fleet import PartitionedData

    specs: dict[bytes, ModelSpec] = {}
    first: dict[str, Cell] = {}
    for cell in cells:
        first.setdefault(cell.label, cell)
    for cell in first.values():
        settings = cell.settings
        shaped_by = msgspec.json.encode((settings.model, settings.data, settings.task))
        try:
            if shaped_by not in specs:
                shaped = with_model_shape(settings, PartitionedData(settings, cell.given))
                specs[shaped_by] = prepare(shaped, cell.runs).spec
            from_section(settings.method, specs[shaped_by], settings.task.kind)
        except SettingError as problem:
            raise SettingError(f"{cell.label}: {problem}") from None
