"""HTML of report pages: functions that return escaped text. A page loads nothing and runs nothing."""

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

STYLE = """
:root { color-scheme: light dark; --ground: #f6f8fa; --card: #ffffff; --ink: #1b1f24; --faint: #57606a;
  --line: #d8dee4; --ours: #0072b2; --good: #00714f; --bad: #b34700; }
@media (prefers-color-scheme: dark) { :root { --ground: #0d1117; --card: #161b22; --ink: #e6edf3;
  --faint: #9da7b3; --line: #30363d; --ours: #56b4e9; --good: #2ec4a0; --bad: #e69f00; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 76rem; background: var(--ground);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { margin: 0; font-size: 1.7rem; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 2rem 0 .7rem; font-size: 1.15rem; }
p { margin: .4rem 0; } .faint, figcaption { color: var(--faint); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(10.6rem, 1fr)); gap: .8rem;
  margin: 1.2rem 0 .8rem; }
.cards div, figure, .scroll, pre { background: var(--card); border: 1px solid var(--line);
  border-radius: .6rem; }
.cards div { padding: .7rem .9rem; }
.cards dt { color: var(--faint); font-size: .85rem; } .cards dd { margin: 0; }
.cards dd:first-of-type { font-size: 1.2rem; white-space: nowrap; font-weight: 650; line-height: 1.3; }
.cards dd + dd { font-size: .85rem; color: var(--faint); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr));
  gap: .8rem; align-items: start; }
figure { margin: 0; padding: .8rem; } figure img { display: block; width: 100%; height: auto; }
figcaption { font-size: .85rem; margin-top: .4rem; }
.scroll { overflow: auto; max-height: 36rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .4rem .75rem; text-align: right; white-space: nowrap; border-top: 1px solid var(--line); }
th { position: sticky; top: 0; background: var(--card); color: var(--faint); font-weight: 600;
  border-top: 0; white-space: normal; vertical-align: bottom; line-height: 1.25; }
th:first-child, td:first-child, .text { text-align: left; }
td.prose { white-space: normal; text-align: left; width: 100%; }
tr.ours td, td.best { font-weight: 650; } tr.ours td:first-child { color: var(--ours); }
.good { color: var(--good); } .bad { color: var(--bad); }
pre { margin: 0; padding: .9rem; overflow-x: auto; font-size: .85rem; }
"""


_VOID = frozenset(("img", "meta", "source"))  # elements without content


class Html(str):
    """Text that is already HTML; elements escape all other text."""

    __slots__ = ()


@dataclass(frozen=True)
class Plot:
    """One picture, as SVG for light and dark screens."""

    name: str
    light: bytes
    dark: bytes


def document(title: str, sections: Iterable[Html]) -> bytes:
    """A whole page as UTF-8."""
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("title", f"{title} · Fleetune"),
        element("style", Html(STYLE)),
    )
    page = element("html", head, element("body", *sections), lang="en")
    return f"<!DOCTYPE html>\n{page}\n".encode(errors="replace")


def element(tag: str, *content: str, class_: str = "", **attributes: str) -> Html:
    """An element; content and attributes that are not `Html` are escaped."""
    named = {"class": class_, **attributes} if class_ else attributes
    written = "".join(f' {name.replace("_", "-")}="{escape(value)}"' for name, value in named.items())
    if tag in _VOID:
        return Html(f"<{tag}{written}>")
    inner = "".join(part if isinstance(part, Html) else escape(part, quote=False) for part in content)
    return Html(f"<{tag}{written}>{inner}</{tag}>")


def note(text: str) -> Html:
    """A paragraph that explains the element next to it."""
    return element("p", text, class_="faint")


def cell(text: str, class_: str) -> Html:
    """A table cell with a style: `text` aligns it left, `prose` also wraps its lines."""
    return element("td", text, class_=class_)


def row(cells: Iterable[str], class_: str = "") -> Html:
    """A row of a table; plain text becomes a plain cell."""
    return element(
        "tr", *(one if isinstance(one, Html) else element("td", one) for one in cells), class_=class_
    )


def table(columns: Sequence[str], rows: Iterable[Html], *, left: Sequence[str] = ()) -> Html:
    """A table that scrolls on its own; the first column and those named in `left` are aligned left."""
    heads = [element("th", column, class_="text" if column in left else "") for column in columns]
    whole = element("table", element("thead", element("tr", *heads)), element("tbody", *rows))
    return element("div", whole, class_="scroll")


def card(name: str, value: str, *notes: str) -> Html:
    """A headline card: the name of a figure, its value, and notes."""
    return element("div", element("dt", name), element("dd", value), *(element("dd", one) for one in notes))


def cards(shown: Iterable[Html]) -> Html:
    """The headline of a page."""
    return element("dl", *shown, class_="cards")


def figure(plot: Plot, caption: str) -> Html:
    """A picture with its caption."""
    dark = element("source", srcset=_data_uri(plot.dark), media="(prefers-color-scheme: dark)")
    light = element("img", src=_data_uri(plot.light), alt=caption)
    return element("figure", element("picture", dark, light), element("figcaption", caption))


def figures(shown: Iterable[Html]) -> Html:
    """Several pictures, side by side if there is room."""
    return element("div", *shown, class_="plots")


def _data_uri(svg: bytes) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()
