"""Makes configurations from --methods and [compare], and plans their runs with several seeds."""

import dataclasses
import fnmatch
import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from fleetune.protocols.errors import SettingError
from fleetune.protocols.methods import REGISTRY, from_section, with_defaults_of_run
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.one_line import suggestion
from fleetune.protocols.settings.rate_schedule import with_schedule_of_run
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.run_toml import settings_of
from fleetune.protocols.settings.user_sources import Sources, user_sources
from fleetune.protocols.tasks.scores import Score
from fleetune.tools.compare.comparison import Configuration
from fleetune.tools.compare.runs import PlannedRun
from fleetune.tools.simulator.caller_samples import NO_CALLER_SAMPLES, CallerSamples
from fleetune.tools.simulator.device_specs import with_group_devices

BASELINES = ("local-only", "fedavg")
OF_OTHER_SECTIONS = {
    "ratios": "fleet.ratios",
    "up": "encoding.up",
    "down": "encoding.down",
    "minimise": "objective.minimise",
}
"""Settings of other sections that [compare.LABEL] can change, by the key to write there."""
LONGEST_NAME = 80  # maximum length of a configuration's folder name
# returns the caller's samples for a run's settings, which include its seed
SamplesOf = Callable[[RunSettings], CallerSamples]


def no_samples(_: RunSettings) -> CallerSamples:
    """Return no samples of the caller: the run uses the samples that [data] names."""
    return NO_CALLER_SAMPLES


def labels_of(settings: RunSettings, methods: str | None) -> list[str]:
    """Return the configurations that `--methods` names.

    Args:
        settings: settings of the run file.
        methods: comma-separated labels of [compare] or names of methods, or patterns of them (`kapc*`). `all`
            means every method and all of [compare]. None means the baselines, the file's own method, and all
            of [compare].

    Raises:
        SettingError: a pattern matches nothing.
    """
    known = list(dict.fromkeys([*settings.compare, *sorted(REGISTRY)]))
    if methods in (None, "all"):
        named = sorted(REGISTRY) if methods else [settings.method["name"]]
        return list(dict.fromkeys([*BASELINES, *named, *settings.compare]))
    labels: list[str] = []
    for label in map(str.strip, (methods or "").split(",")):
        if not set(label) & set("*?["):
            labels.append(label)
            continue
        matching = fnmatch.filter(known, label)
        if not matching:
            raise SettingError(
                f"--methods: no method or [compare] label matches {label!r}; known: {', '.join(known)}"
            )
        labels += [one for one in matching if one not in labels]
    return labels


def configurations_of(settings: RunSettings, labels: Sequence[str]) -> list[Configuration]:
    """Return methods and labels as configurations, with their settings from [method] or [compare.LABEL].

    Raises:
        SettingError: `labels` is empty, a label occurs twice, or a label is neither a method nor a
            [compare.LABEL].
    """
    if not all(labels) or not labels:
        raise SettingError("--methods: name at least one, e.g. --methods local-only,fedavg,fedspu")
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise SettingError(f"--methods: {twice} is named twice; name each method once")
    return [_configuration(settings, label) for label in labels]


def _configuration(settings: RunSettings, label: str) -> Configuration:
    own = settings.method if settings.method["name"] == label else {}
    section = {**own, "name": label, **settings.compare.get(label, {})}
    name = section["name"]
    if not isinstance(name, str) or (name not in REGISTRY and ":" not in name):
        known = [*REGISTRY, *settings.compare]
        raise SettingError(f"--methods: no method {name!r}; {suggestion(str(name), known)}")
    changes = {path: section.pop(key) for key, path in OF_OTHER_SECTIONS.items() if key in section}
    configuration = Configuration(label, section, changes)
    try:
        varied(settings, configuration)
    except SettingError as problem:
        raise SettingError(f"compare.{problem}") from None
    return configuration


def varied(settings: RunSettings, configuration: Configuration) -> RunSettings:
    """Return the settings of the run file with the changes of a configuration.

    Raises:
        SettingError: a setting of the configuration is wrong.
    """
    own = replace(settings, method=dict(configuration.method))
    try:
        return settings_of(own, configuration.changes) if configuration.changes else own
    except SettingError as problem:
        raise SettingError(f"{configuration.label}: {problem}") from None


def planned_runs(
    settings: RunSettings,
    configurations: Sequence[Configuration],
    seeds: int | Sequence[int],
    folder: Path,
    samples_of: SamplesOf = no_samples,
) -> list[PlannedRun]:
    """Return a run for each configuration and seed; all configurations with the first seed come first."""
    runs = []
    sources: dict[str, Sources] = {}
    for seed in seeds_of(settings, seeds):
        of_seed: dict[str, PlannedRun] = {}
        seeded = replace(settings, run=replace(settings.run, seed=seed), compare={})
        samples = samples_of(seeded)
        seeded = samples.named_in(seeded)
        for one in configurations:
            own = varied(seeded, one)
            if not own.fleet.devices:
                own = with_group_devices(own, samples.samples(own))
            rounds = own.run.last_round
            own = replace(
                own,
                method=with_defaults_of_run(own.method, rounds, time_counts=own.time_counts),
                training=with_schedule_of_run(own.training, rounds),
            )
            if one.label not in sources:
                sources[one.label] = user_sources(own)
            run_folder = folder / folder_name(one.label) / f"seed-{seed}"
            of_seed[one.label] = PlannedRun(
                one.label, own, run_folder, folder.parent, samples, sources=sources[one.label]
            )
        for one in configurations:
            within = tuple(of_seed[label] for label in one.within)
            runs.append(dataclasses.replace(of_seed[one.label], within=within))
    return runs


def folder_name(label: str) -> str:
    """Return the name of a configuration's folder; different labels have different names."""
    name = label.replace(":", "-").replace(", ", ",")
    plain = re.sub(r"[^\w.=,+-]", "_", name)
    if plain == name and len(name) <= LONGEST_NAME:
        return name
    return f"{plain[:LONGEST_NAME]}-{hashlib.blake2b(label.encode(), digest_size=4).hexdigest()}"


def seeds_of(settings: RunSettings, seeds: int | Iterable[int]) -> Sequence[int]:
    """Return the given seeds; for a number, that many seeds from `run.seed` on.

    Raises:
        SettingError: there is no seed, or a seed occurs twice.
    """
    if isinstance(seeds, int):
        if seeds < 1:
            raise SettingError(f"--seeds {seeds}: the number of seeds must be at least 1")
        return range(settings.run.seed, settings.run.seed + seeds)
    named = tuple(map(int, seeds))
    if not named or len(set(named)) < len(named):
        raise SettingError(f"--seeds {list(named)}: name at least one seed, and no seed twice")
    return named


def check_target(target: float | None, score: Score) -> None:
    """Raise SettingError if the target of a score between 0 and 1 is outside this range."""
    if target is not None and score.share and not 0 < target < 1:
        raise SettingError(
            f"--target {target:g}: the target of {score.title} must be between 0 and 1, e.g. 0.9"
        )


def check_methods(runs: Sequence[PlannedRun]) -> None:
    """Create the method of each configuration once, so that wrong settings are found before any run.

    Raises:
        SettingError: a method rejects its settings, or the model cannot be created.
    """
    from fleetune.coordinator.run.enrolment import prepare
    from fleetune.tools.simulator.partitioned_data import PartitionedData
    from fleetune.tools.simulator.run_devices import with_model_shape

    specs: dict[bytes, ModelSpec] = {}
    first: dict[str, PlannedRun] = {}
    for run in runs:
        first.setdefault(run.label, run)
    for run in first.values():
        settings = run.settings
        shaped_by = msgspec.json.encode((settings.model, settings.data, settings.task))
        try:
            if shaped_by not in specs:
                shaped = with_model_shape(settings, PartitionedData.of_run(settings, run.samples))
                specs[shaped_by] = prepare(shaped, run.runs).spec
            from_section(settings.method, specs[shaped_by], settings.task.kind)
        except SettingError as problem:
            raise SettingError(f"{run.label}: {problem}") from None
