"""What pages are made of: one file that loads nothing, on a phone, by day and by night; text stays text."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, tostring

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


@dataclass(frozen=True)
class Plot:
    """One picture, as SVG for light and dark screens."""

    name: str
    light: bytes
    dark: bytes


def document(title: str, sections: Sequence[Element]) -> bytes:
    """A whole page as UTF-8 that loads nothing and runs nothing."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element(
            "meta",
            http_equiv="Content-Security-Policy",
            content="default-src 'none'; img-src data:; style-src 'unsafe-inline'",
        ),
        element("title", f"{title} · Fleetune"),
        element("style", STYLE),
    )
    html = element("html", head, element("body", *sections), lang="en")
    text: str = tostring(html, encoding="unicode", method="html")
    return f"<!DOCTYPE html>\n{text}\n".encode(errors="replace")


def element(tag: str, *content: Element | str | None, class_: str = "", **attributes: str) -> Element:
    """An element; texts come before children."""
    named = {name.replace("_", "-"): value for name, value in attributes.items()}
    made = Element(tag, {**({"class": class_} if class_ else {}), **named})
    made.text = "".join(part for part in content if isinstance(part, str)) or None
    made.extend(part for part in content if isinstance(part, Element))
    return made


def card(name: str, value: str, *notes: str) -> Element:
    """A figure of the headline: what it is, its value, and what to know about it."""
    return element("div", element("dt", name), element("dd", value), *(element("dd", note) for note in notes))


def figure(plot: Plot, caption: str) -> Element:
    dark = element("source", srcset=_data_uri(plot.dark), media="(prefers-color-scheme: dark)")
    light = element("img", src=_data_uri(plot.light), alt=caption)
    return element("figure", element("picture", dark, light), element("figcaption", caption))


def table(columns: Sequence[str], rows: Sequence[Element], *, left: Sequence[str] = ()) -> Element:
    """A table that scrolls by itself; the first column and those named in `left` are aligned left."""
    heads = [element("th", column, class_="text" if column in left else "") for column in columns]
    whole = element("table", element("thead", element("tr", *heads)), element("tbody", *rows))
    return element("div", whole, class_="scroll")


def row(cells: Sequence[str | Element], class_: str = "") -> Element:
    return element(
        "tr", *(element("td", cell) if isinstance(cell, str) else cell for cell in cells), class_=class_
    )


def _data_uri(svg: bytes) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()
