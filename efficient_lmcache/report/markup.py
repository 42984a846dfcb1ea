"""HTML from values: what is not already `Html` is escaped, and None is nothing."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


_INDEXED = re.compile(r"\b([γKC])_([HG])\b")


def markup(value: object) -> Html:
    """`value` as HTML: itself if it is `Html`, nothing if it is None, else its escaped text."""
    if isinstance(value, Html):
        return value
    return Html() if value is None else escaped(str(value))


def escaped(text: str) -> Html:
    """`text` as HTML, with the indices of symbols such as γ_H set as such. Plotly reads the same markup."""
    return Html(_INDEXED.sub(r"\1<sub>\2</sub>", html.escape(text)))


def element(tag: str, *content: object, **attributes: object) -> Html:
    """`<tag attributes>content</tag>`; `class_` is class, `aria_label` aria-label; None leaves one out."""
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Html(f"<{tag}{written}>{joined(content)}</{tag}>")


def joined(parts: Iterable[object], between: str = "") -> Html:
    return Html(between.join(markup(part) for part in parts))


@dataclass(frozen=True, slots=True)
class Column:
    """A table's column.

    Attributes:
        title: its head, with the unit.
        number: right-aligned, in figures of equal width.
    """

    title: str
    number: bool = True


def table(caption: object, columns: Sequence[Column], rows: Sequence[Sequence[object]]) -> Html:
    """A captioned table in a box of its own that scrolls sideways where the page is too narrow.

    The first cell of a row is its head. A row shorter than the columns ends in one cell that spans the rest.
    """
    classes = ["number" if column.number else None for column in columns]
    head = joined(
        element("th", column.title, scope="col", class_=name) for column, name in zip(columns, classes, strict=True)
    )
    body = joined(_row(cells, classes) for cells in rows)
    inner = element(
        "table",
        element("caption", element("div", caption)),
        element("thead", element("tr", head)),
        element("tbody", body),
    )
    return element("div", inner, class_="scroll", role="region", tabindex=0, aria_label=_plain(caption))


def _row(cells: Sequence[object], classes: Sequence[str | None]) -> Html:
    written = [element("th", cells[0], scope="row", class_=classes[0])]
    for index, cell in enumerate(cells[1:], start=1):
        rest = len(classes) - index if index == len(cells) - 1 else 1
        span = rest if rest > 1 else None
        written.append(element("td", cell, class_=None if span else classes[index], colspan=span))
    return element("tr", joined(written))


def _plain(caption: object) -> str:
    """A caption's first sentence, for the label of its box."""
    return str(caption).split(". ")[0] if not isinstance(caption, Html) else "table"
