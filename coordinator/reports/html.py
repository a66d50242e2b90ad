"""Builds report pages in HTML from escaped text. A page loads no files and runs no scripts."""

import base64
from collections.abc import Iterable, Sequence
from html import escape

STYLE = """
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 76rem; background: #f6f8fa; color: #1b1f24;
  font: 16px/1.5 system-ui, sans-serif; }
h1 { overflow-wrap: anywhere; } h2 { margin: 2rem 0 .7rem; font-size: 1.15rem; }
.faint, figcaption, dt, dd + dd, th { color: #57606a; font-size: .88rem; }
.cards, .plots { display: grid; gap: .8rem; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); }
.plots { grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr)); }
.cards div, figure, .scroll, pre { margin: 0; padding: .8rem; background: #ffffff; border: 1px solid #d8dee4;
  border-radius: .6rem; overflow: auto; max-height: 36rem; }
dd { margin: 0; } dd:first-of-type { font-size: 1.2rem; font-weight: 650; } figure img { width: 100%; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: right; vertical-align: top; border-bottom: 1px solid #d8dee4; }
td { white-space: nowrap; } td.text { white-space: normal; min-width: 12rem; }
th:first-child, td:first-child, .text { text-align: left; }
tr.ours td, td.best { font-weight: 650; } .good { color: #00714f; } .bad { color: #b34700; }
"""


_VOID = frozenset(("img", "meta"))  # elements without content


class Html(str):
    """Text that is already HTML; elements escape all other text."""

    __slots__ = ()


def document(title: str, sections: Iterable[Html]) -> bytes:
    """Return a whole page as UTF-8."""
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
    """Return an HTML element; content and attributes that are not `Html` are escaped."""
    named = {"class": class_, **attributes} if class_ else attributes
    written = "".join(f' {name.replace("_", "-")}="{escape(value)}"' for name, value in named.items())
    if tag in _VOID:
        return Html(f"<{tag}{written}>")
    inner = "".join(part if isinstance(part, Html) else escape(part, quote=False) for part in content)
    return Html(f"<{tag}{written}>{inner}</{tag}>")


def note(text: str) -> Html:
    """Return a paragraph that explains the element next to it."""
    return element("p", text, class_="faint")


def cell(text: str, class_: str) -> Html:
    """Return a styled table cell: `text` aligns it left; `good`, `bad` and `best` emphasise it."""
    return element("td", text, class_=class_)


def row(cells: Iterable[str], class_: str = "") -> Html:
    """Return a table row; plain text becomes a plain cell."""
    return element(
        "tr", *(one if isinstance(one, Html) else element("td", one) for one in cells), class_=class_
    )


def table(columns: Sequence[str], rows: Iterable[Html], *, left: Sequence[str] = ()) -> Html:
    """Return a table that scrolls on its own; the first column and those in `left` are aligned left."""
    heads = [element("th", column, class_="text" if column in left else "") for column in columns]
    whole = element("table", element("thead", element("tr", *heads)), element("tbody", *rows))
    return element("div", whole, class_="scroll")


def card(name: str, value: str, *notes: str) -> Html:
    """Return a headline card: a figure's name, its value, and notes."""
    return element("div", element("dt", name), element("dd", value), *(element("dd", one) for one in notes))


def cards(shown: Iterable[Html]) -> Html:
    """Return the headline of a page, a row of cards."""
    return element("dl", *shown, class_="cards")


def figure(png: bytes, caption: str) -> Html:
    """Return a picture with its caption."""
    address = "data:image/png;base64," + base64.b64encode(png).decode()
    return element("figure", element("img", src=address, alt=caption), element("figcaption", caption))


def figures(shown: Iterable[Html]) -> Html:
    """Return several pictures, side by side if there is room."""
    return element("div", *shown, class_="plots")
