"""What is kept in a store of samples, for people and scripts."""

from dataclasses import asdict, dataclass
from typing import Any

from fleetune.edge_agent.stream import store_values
from fleetune.edge_agent.stream.retention import RetentionLimits
from fleetune.edge_agent.stream.sample import NUMBERS, UNLABELLED
from fleetune.edge_agent.stream.sample_requirements import PARTS, SampleRequirements
from fleetune.edge_agent.stream.sample_store import SampleStore

_SPECIAL = {UNLABELLED: "no label yet", NUMBERS: "numbers"}


@dataclass(frozen=True)
class ClassCount:
    """Samples of one class: how many are trained (or validated) and tested on, and their bytes."""

    name: str
    train: int
    test: int
    num_bytes: int


@dataclass(frozen=True)
class Status:
    """What is kept.

    Attributes:
        classes: by label, and samples without one.
        shapes: how many samples of each dtype and shape.
        num_bytes: that samples take, of `most_bytes`.
        most_bytes: that they may.
        oldest_days, newest_days: ages by the store's own clock; None: there are no samples.
        new: that came or were labelled since the last training.
        refused: by kind, how many samples, files and messages were not taken, and the last words of each.
        drift: 1 is an alarm; None: there was no training yet, or too little has come since.
    """

    classes: tuple[ClassCount, ...]
    shapes: dict[str, int]
    num_bytes: int
    most_bytes: int
    oldest_days: float | None
    newest_days: float | None
    new: int
    refused: dict[str, tuple[int, str]]
    drift: float | None

    def as_dict(self) -> dict[str, Any]:
        """For scripts."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For people, below the table of classes."""
        shapes = ", ".join(f"{count:,} of {shape}" for shape, count in self.shapes.items())
        drift = "not known yet" if self.drift is None else f"{self.drift:.2f} (1 is an alarm)"
        age = ""
        if self.oldest_days is not None and self.newest_days is not None:
            age = f"; {self.oldest_days:.1f} to {self.newest_days:.1f} days old"
        return [
            f"{self.num_bytes / 1e6:.1f} of {self.most_bytes / 1e6:.1f} MB{age}",
            f"inputs: {shapes or 'none'}",
            f"new since the last training: {self.new:,}; drift: {drift}",
            *(
                f"not taken, {kind}: {count:,}, last: {words}"
                for kind, (count, words) in self.refused.items()
            ),
        ]


def status(store: SampleStore, test_fraction: float) -> Status:
    """What is kept, with the samples that such a fraction tests on. Raises StoreError."""
    with store.reading() as connection:
        bounds = store_values.get(connection, RetentionLimits) or RetentionLimits()
        rows = connection.execute(
            "SELECT class, sum(for_test >= ?1), sum(for_test < ?1), sum(num_bytes) FROM sample"
            " WHERE dropped IS NULL GROUP BY class ORDER BY class",
            (test_fraction,),
        ).fetchall()
        shapes = connection.execute(
            "SELECT dtype, shape, count(*) FROM sample JOIN form ON form.number = form WHERE dropped IS NULL"
            " GROUP BY form.number ORDER BY form.number"
        ).fetchall()
        clock = store_values.get(connection, store_values.StoreClock) or store_values.StoreClock()
        ages = connection.execute(
            "SELECT ? - min(arrived_s), ? - max(arrived_s) FROM sample WHERE dropped IS NULL",
            (clock.seconds, clock.seconds),
        ).fetchone()
        (new,) = connection.execute(
            "SELECT count(*) FROM sample WHERE changed > ? AND dropped IS NULL",
            (store_values.get_number(connection, "trained"),),
        ).fetchone()
        refusals = connection.execute("SELECT kind, count, last FROM refusal ORDER BY kind").fetchall()
    days = [None if age is None else round(age / 86_400, 3) for age in ages]
    return Status(
        classes=tuple(ClassCount(_SPECIAL.get(one, str(one)), *rest) for one, *rest in rows),
        shapes={
            f"{dtype.lstrip('<|')} ({shape.replace(' ', ', ')})": count for dtype, shape, count in shapes
        },
        num_bytes=sum(row[3] for row in rows),
        most_bytes=bounds.live_bytes,
        oldest_days=days[0],
        newest_days=days[1],
        new=new,
        refused={kind: (count, words) for kind, count, words in refusals},
        drift=store.drift.figure,
    )


@dataclass(frozen=True)
class RoleCounts:
    """How many samples are kept, by what they are for.

    Attributes:
        train, validation, test: samples with all that the task needs.
        unlabelled: that wait for their label.
        new: of those to train on, that came or were labelled since the last training.
    """

    train: int
    validation: int
    test: int
    unlabelled: int
    new: int


def role_counts(store: SampleStore, wanted: SampleRequirements) -> RoleCounts:
    """Likewise; samples that do not fit the model are among them. Raises StoreError."""
    lacks = "FALSE" if wanted.labels == "optional" else f"class = {UNLABELLED}"
    query = f"""
        SELECT role, count(*), coalesce(sum(changed > :trained), 0) FROM (
            SELECT changed, CASE WHEN {lacks} THEN 'unlabelled' WHEN for_test < :test THEN 'test'
                WHEN for_validation < :validation THEN 'validation' ELSE 'train' END AS role
            FROM sample WHERE dropped IS NULL
        ) GROUP BY role
    """  # noqa: S608 - words of our own
    with store.reading() as connection:
        given = {
            "trained": store_values.get_number(connection, "trained"),
            "test": wanted.test_fraction,
            "validation": wanted.validation_fraction,
        }
        rows = {role: (count, new) for role, count, new in connection.execute(query, given)}
    counts = {role: rows.get(role, (0, 0))[0] for role in (*PARTS, "unlabelled")}
    return RoleCounts(**counts, new=rows.get("train", (0, 0))[1])


def refused(store: SampleStore) -> dict[str, int]:
    """How much was not taken so far, by kind. Raises StoreError."""
    with store.reading() as connection:
        return dict(connection.execute("SELECT kind, count FROM refusal"))
