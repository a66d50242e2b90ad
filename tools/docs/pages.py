"""The generated pages, and the function that generates each."""

from collections.abc import Callable
from pathlib import Path

from fleetune.tools.docs.private_methods import private_methods
from fleetune.tools.docs.public_names import public_names
from fleetune.tools.docs.query_fields import query_fields
from fleetune.tools.docs.robust_rules import robust_rules
from fleetune.tools.docs.run_toml_reference import run_toml_reference

PAGES: dict[str, Callable[[Path], str]] = {
    "docs/private-methods.md": lambda _: private_methods(),
    "docs/public-names.md": lambda _: public_names(),
    "docs/query-fields.md": lambda _: query_fields(),
    "docs/robust-rules.md": lambda _: robust_rules(),
    "docs/run-toml.md": lambda _: run_toml_reference(),
}
