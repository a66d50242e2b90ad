"""Read docstrings: their first sentences, and the descriptions of a class's attributes."""

import inspect
import re
from collections.abc import Iterator

_ENTRY = re.compile(r"(?P<names>\w+(?:, \w+)*): (?P<text>.+)")
_SENTENCE_END = re.compile(r"(?<!\bal)(?<!\beq)\. ")


def first_sentence(docstring: str) -> str:
    """Return the first sentence on one line, without its full stop; `et al.` and `eq.` end no sentence."""
    paragraph = " ".join(docstring.split("\n\n", maxsplit=1)[0].split())
    return _SENTENCE_END.split(paragraph, maxsplit=1)[0].rstrip(".")


def attributes(kind: type) -> dict[str, str]:
    """Descriptions of attributes, by name, from `Attributes:` in the docstrings of a class and its base
    classes.

    Several names may share a text (`mean, std: ...`). A subclass's text replaces that of a base class.
    """
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        found.update(_entries(inspect.cleandoc(one.__dict__.get("__doc__") or "")))
    return found


def _entries(docstring: str) -> Iterator[tuple[str, str]]:
    _, there, rest = docstring.partition("Attributes:\n")
    names: list[str] = []
    words: list[str] = []
    for line in rest.splitlines() if there else ():
        entry = _ENTRY.fullmatch(line.strip()) if line.startswith("    ") and line[4:5] != " " else None
        if entry or not line.startswith("    "):
            yield from ((name, " ".join(words)) for name in names)
            names, words = [], []
        if entry:
            names, words = entry["names"].split(", "), [entry["text"]]
        elif not line.startswith("    "):
            return
        else:
            words.append(line.strip())
    yield from ((name, " ".join(words)) for name in names)
