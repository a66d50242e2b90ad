"""Summarises a store of samples, for `edge-agent samples` and for scripts."""

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
    """Numbers of samples of one class, for training or validation and for testing, and their bytes."""

    name: str
    train: int
    test: int
    num_bytes: int


@dataclass(frozen=True)
class Status:
    """The summary of a store of samples.

    Attributes:
        classes: counts by class, and of samples without a label.
        shapes: number of samples by dtype and shape.
        num_bytes: bytes that the samples take.
        max_bytes: bytes that they may take.
        oldest_days, newest_days: ages by the store's own clock, in days; None if there are no samples.
        new: number of samples that arrived or were labelled since the last training.
        refused: count and last message of refused samples, files and messages, by kind.
        drift: result of the drift tests, 1 is an alarm; None without training, or with too few samples since.
    """

    classes: tuple[ClassCount, ...]
    shapes: dict[str, int]
    num_bytes: int
    max_bytes: int
    oldest_days: float | None
    newest_days: float | None
    new: int
    refused: dict[str, tuple[int, str]]
    drift: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as plain values, for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the lines that `edge-agent samples` prints below the table of classes."""
        shapes = ", ".join(f"{count:,} of {shape}" for shape, count in self.shapes.items())
        drift = "not known yet" if self.drift is None else f"{self.drift:.2f} (1 is an alarm)"
        age = ""
        if self.oldest_days is not None and self.newest_days is not None:
            age = f"; {self.oldest_days:.1f} to {self.newest_days:.1f} days old"
        return [
            f"{self.num_bytes / 1e6:.1f} of {self.max_bytes / 1e6:.1f} MB{age}",
            f"inputs: {shapes or 'none'}",
            f"new since the last training: {self.new:,}; drift: {drift}",
            *(
                f"not taken, {kind}: {count:,}, last: {words}"
                for kind, (count, words) in self.refused.items()
            ),
        ]


def status(store: SampleStore, test_fraction: float) -> Status:
    """Summarise a store.

    Args:
        store: the store.
        test_fraction: samples whose test draw is below it are test samples.

    Raises:
        StoreError: the store cannot be read.
    """
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
        max_bytes=bounds.live_bytes,
        oldest_days=days[0],
        newest_days=days[1],
        new=new,
        refused={kind: (count, words) for kind, count, words in refusals},
        drift=store.drift.figure,
    )


@dataclass(frozen=True)
class RoleCounts:
    """Numbers of samples by their part of the split.

    Attributes:
        train, validation, test: samples with all that the task needs.
        unlabelled: samples without a label that the task needs.
        new: training samples that arrived or were labelled since the last training.
    """

    train: int
    validation: int
    test: int
    unlabelled: int
    new: int


def role_counts(store: SampleStore, requirements: SampleRequirements) -> RoleCounts:
    """Count a store's samples by part, including those that do not fit the model. Raises StoreError."""
    lacks = "FALSE" if requirements.labels == "optional" else f"class = {UNLABELLED}"
    query = f"""
        SELECT role, count(*), coalesce(sum(changed > :trained), 0) FROM (
            SELECT changed, CASE WHEN {lacks} THEN 'unlabelled' WHEN for_test < :test THEN 'test'
                WHEN for_validation < :validation THEN 'validation' ELSE 'train' END AS role
            FROM sample WHERE dropped IS NULL
        ) GROUP BY role
    """  # noqa: S608 - words of our own
    with store.reading() as connection:
        values = {
            "trained": store_values.get_number(connection, "trained"),
            "test": requirements.test_fraction,
            "validation": requirements.validation_fraction,
        }
        rows = {role: (count, new) for role, count, new in connection.execute(query, values)}
    counts = {role: rows.get(role, (0, 0))[0] for role in (*PARTS, "unlabelled")}
    return RoleCounts(**counts, new=rows.get("train", (0, 0))[1])


def refused(store: SampleStore) -> dict[str, int]:
    """Return saved counts of refused samples, files and messages, by kind. Raises StoreError."""
    with store.reading() as connection:
        return dict(connection.execute("SELECT kind, count FROM refusal"))
