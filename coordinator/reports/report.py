"""Writes a run's final files for people and scripts: summary.json, rounds.jsonl, pictures, report.html."""

import importlib.util
import logging
import os
import platform
import subprocess
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
from msgspec import UNSET, structs

from fleetune.coordinator.extensions.releases import rollout_in
from fleetune.coordinator.metrics.personal_scores import with_personal
from fleetune.coordinator.metrics.privacy import privacy_summary, with_epsilon
from fleetune.coordinator.metrics.summarise import summarise
from fleetune.coordinator.metrics.summary import SUMMARY, Host, Provenance, Summary, encoded
from fleetune.coordinator.reports.page import Page, write_page
from fleetune.coordinator.reports.proposals.explanation import by_encoding, by_ratio
from fleetune.coordinator.rounds.engine import ALL_DONE
from fleetune.coordinator.rounds.records import RoundRecord, lines_of
from fleetune.coordinator.run.processor_time import ProcessorTime
from fleetune.coordinator.run.round_journal import ROUNDS
from fleetune.coordinator.run.stored_run import Run, stored_sources
from fleetune.coordinator.store.run_folder import DAYS
from fleetune.protocols.files import write_atomically
from fleetune.protocols.method.diagnostics import declared_diagnostics
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.version import VERSION

log = logging.getLogger(__name__)

NO_PICTURES = "No pictures, because matplotlib is not installed: pip install matplotlib adds them."
_PACKAGES = {"torch": "torch", "numpy": "numpy", "onnxruntime": "onnxruntime"}
_GIT_TIMEOUT_S = 5.0
_SOURCE_TREE = Path(__file__).resolve().parents[2]  # root of the checkout, if Fleetune runs from one


def summary_of(run: Run, *, simulated: bool) -> Summary:
    """Return the summary of an open run, with agents, proposals and provenance; see `summarise`."""
    controller = run.controller
    state, records = controller.engine_state, controller.records()
    summary = summarise(
        run.settings,
        run.enrolment.spec,
        records,
        controller.ledger,
        state.counters,
        reports={device: member.report for device, member in state.members.items() if member.report},
        simulated=simulated,
        diagnostics=declared_diagnostics(run.method),
        rollout=rollout_in(run.store, run.settings.adoption),
    )
    agents = Counter(agent for member in state.members.values() if (agent := member.introduction.agent))
    if agents:
        summary = structs.replace(summary, agents=dict(sorted(agents.items())))
    if controller.finished not in (None, ALL_DONE):
        summary = structs.replace(summary, ended=controller.finished)
    if (section := run.settings.privacy) is not None:
        rows = with_epsilon(summary.by_device, section, state)
        summary = structs.replace(summary, privacy=privacy_summary(section, state), by_device=rows)
    if run.settings.proposes_ratios:
        used = by_encoding(records) or UNSET
        summary = structs.replace(summary, by_ratio=by_ratio(records), by_encoding=used)
    return structs.replace(summary, provenance=provenance_of(run))


def write_report(
    folder: Path,
    settings: RunSettings,
    summary: Summary,
    records: Sequence[RoundRecord],
    *,
    rivals: Mapping[str, Summary] | None = None,
    boards: Mapping[DeviceId, str] | None = None,
    durable: bool = True,
    left_out: Collection[str] = (),
) -> list[Path]:
    """Write a run's report into its folder, and return the paths; files for scripts are written before
    pictures.

    Args:
        folder: the run's folder; the report shows its run.toml unchanged.
        settings: settings of the run.
        summary: see `coordinator.metrics.summarise.summarise`.
        records: records of all closed rounds, ascending.
        rivals: summaries of other runs on the same fleet for comparison, by method.
        boards: boards of the devices.
        durable: True to survive a power cut; simulations use False.
        left_out: names of files to skip.

    Without matplotlib, pictures are omitted, and one line in the log reports it.

    Raises:
        StoreError: a file cannot be written.
    """
    whole = with_personal(summary, records)
    others = {name: rival for name, rival in (rivals or {}).items() if name != summary.method}
    written = _write(folder, figures(summary, records), durable=durable, left_out=left_out)
    pictures: dict[str, bytes] = {}
    has_pictures = can_paint()
    if has_pictures:
        from fleetune.coordinator.reports.pictures.plots import Story, draw
        from fleetune.coordinator.reports.pictures.theme import png

        drawn = draw(Story(whole, records, others))
        pictures = {name: png(figure) for name, figure in drawn.items()}
    page = Page(
        title=settings.run.name,
        summary=whole,
        rivals=others,
        boards=boards or {},
        pictures=pictures,
        run_file=_run_file(folder, settings),
        remark="" if has_pictures else NO_PICTURES,
    )
    files = {**{f"{name}.png": data for name, data in pictures.items()}, "report.html": write_page(page)}
    return written + _write(folder, files, durable=durable, left_out=left_out)


def can_paint() -> bool:
    """True if matplotlib is installed; otherwise a line in the log reports that there are no pictures."""
    there = importlib.util.find_spec("matplotlib") is not None
    if not there:
        log.warning(NO_PICTURES)
    return there


def write_figures(folder: Path, summary: Summary, records: Sequence[RoundRecord]) -> list[Path]:
    """Write only the files of `figures` into a simulated run's folder, and return their paths.

    Raises:
        StoreError: a file cannot be written.
    """
    return _write(folder, figures(summary, records), durable=False)


def _write(
    folder: Path, files: Mapping[str, bytes], *, durable: bool, left_out: Collection[str] = ()
) -> list[Path]:
    written = {folder / name: data for name, data in files.items() if name not in left_out}
    for path, data in written.items():
        write_atomically(path, data, durable=durable, mode=None)
    return list(written)


def figures(summary: Summary, records: Sequence[RoundRecord]) -> dict[str, bytes]:
    """Return the content of summary.json and rounds.jsonl; also days.jsonl if a simulation's data grew."""
    found = {SUMMARY: encoded(summary), ROUNDS: lines_of(records)}
    if summary.days is not UNSET:
        found[DAYS] = b"".join(msgspec.json.encode(day) + b"\n" for day in summary.days)
    return found


def _run_file(folder: Path, settings: RunSettings) -> str:
    path = folder / "run.toml"
    if path.is_file():
        return path.read_text(encoding="utf-8", errors="replace")
    return msgspec.json.format(msgspec.json.encode(settings), indent=2).decode()


def provenance_of(run: Run) -> Provenance:
    """Return the provenance of a run that this process executes."""
    commits = {"folder": _commit(Path.cwd())}
    if (_SOURCE_TREE / "pyproject.toml").is_file():
        commits["fleetune"] = _commit(_SOURCE_TREE)
    return Provenance(
        versions=_versions(),
        commits={name: found for name, found in commits.items() if found},
        host=_host(),
        sources=dict(stored_sources(run.store)),
        processor_s=ProcessorTime.stored_s(run.store) or None,
    )


@cache
def _versions() -> dict[str, str]:
    found = {"fleetune": VERSION, "python": platform.python_version()}
    for name, package in _PACKAGES.items():
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            continue
    return found


@cache
def _commit(folder: Path) -> str:
    """Return the git commit of a folder; "" if the folder is in no git tree, or git is missing."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


@cache
def _host() -> Host:
    return Host(platform.system(), platform.machine(), _processor(), os.cpu_count())


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model\t")))
    return next(filter(None, named), platform.processor())
