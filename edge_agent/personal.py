"""The model that a device has come to in a run, and the bundle to compute it with."""

from dataclasses import dataclass
from pathlib import Path

from edge_agent.joining import check_trust
from edge_agent.session import recall
from edge_agent.store import AgentStore
from protocols.bundle import Bundle, read_bundle
from protocols.errors import PacketError, StoreError
from protocols.methods import from_section
from protocols.model import FlatArray
from protocols.payloads import read_enrolment


@dataclass(frozen=True)
class PersonalModel:
    """A device's own model.

    Attributes:
        run: in which it was trained.
        round: the last that it has done there; 0: none yet.
        weights: shape (bundle.spec.size,).
        bundle: of the model.
    """

    run: str
    round: int
    weights: FlatArray
    bundle: Bundle


def personal_model(
    store: AgentStore, run: str | None = None, bundle: Path | None = None, *, trusted: tuple[str, ...] = ()
) -> PersonalModel:
    """What a device has learned.

    Args:
        store: of the device.
        run: None: the latest it joined.
        bundle: file of the model's bundle; None: the one that came over the wire.
        trusted: modules of the owner's own whose code the run may name.

    Raises:
        StoreError: the device knows no such run, or what it knows is damaged, or it has no bundle of it.
        SettingError: the run's method is not known here, or is code that its owner does not trust.
    """
    run = run or next(iter(store.runs()), None)
    data = None if run is None else store.enrolment(run).read()
    if run is None or data is None:
        raise StoreError(f"{store.folder}: this device has joined no run {run or 'yet'}; see edge-agent run")
    try:
        enrolment = read_enrolment(data)
        check_trust(enrolment, trusted, builds_model=False)
        method = from_section(enrolment.method, enrolment.spec)
        kept = recall(enrolment, method, store.session(run))
        found = _bundle(store, run, bundle)
        read = read_bundle(found, enrolment.spec)
    except PacketError as problem:
        raise StoreError(f"{store.folder}, run {run}: {problem}") from None
    return PersonalModel(run, kept.round, method.personal_model(kept.state), read)


def _bundle(store: AgentStore, run: str, path: Path | None) -> bytes:
    if path is not None:
        try:
            return path.read_bytes()
        except OSError as problem:
            raise StoreError(f"cannot read bundle {path}: {problem.strerror}") from None
    found = store.bundle(run)
    if found is None:
        raise StoreError(
            f"{store.folder}: no bundle of run {run} is here, its model is trained by torch; give --bundle"
            " FILE that edge-coordinator export wrote"
        )
    return found
