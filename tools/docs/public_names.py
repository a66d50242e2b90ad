"""docs/public-names.md: the public names of `fleetune`, each with its description and file."""

import inspect
from collections.abc import Iterator

import fleetune
from fleetune.tools.docs.docstrings import first_sentence

_HEAD = """# What is public

`from fleetune import ...`: these names, and what `fleetune.errors` and `fleetune.bounds` hold, are what code
of yours may count on; everything else may change from one release to the next. Made by `make docs` from
`fleetune.__all__`; nothing heavy is imported before it is used. [Add a method](add-a-method.md) shows most of
them at work.

| name | what it is | where |
|---|---|---|"""
_UNTOLD = {  # types without a docstring, because they are not classes
    "FlatArray": "A model's weights as one vector, float32, shape (spec.size,)",
    "MaskArray": "Which entries of the vector, bool, shape (spec.size,); True = selected",
    "Selection": "Any of the ways to say which entries are meant",
    "__version__": "Which release this is",
}


def public_names() -> str:
    """Return the text of the page."""
    return "\n".join([_HEAD, *_rows()]) + "\n"


def _rows() -> Iterator[str]:
    for name in sorted(fleetune.__all__, key=str.lower):
        found = getattr(fleetune, name)
        said = _UNTOLD.get(name) or first_sentence(inspect.getdoc(found) or "")
        yield f"| `{name}` | {said.replace('|', '&#124;')} | {_where(found)} |"


def _where(found: object) -> str:
    """Return the file or folder of an object, below the repository; "" if it is unknown."""
    module = found if inspect.ismodule(found) else inspect.getmodule(found)
    if module is None or not module.__name__.startswith("fleetune."):
        return ""
    path = module.__name__.removeprefix("fleetune.").replace(".", "/")
    return f"`{path}/`" if hasattr(module, "__path__") else f"`{path}.py`"
