"""The report as one self-contained HTML page: no network, plotly.js inside, readable without it."""

from __future__ import annotations

import base64
import functools
import gzip
import html
import json
import os
from collections.abc import Callable, Iterable
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

from efficient_lmcache import __version__
from efficient_lmcache.report.analyses import Analyses
from efficient_lmcache.report.figures import Figure, Panel
from efficient_lmcache.report.markup import Html, element, joined
from efficient_lmcache.report.page_facts import facts, title
from efficient_lmcache.report.page_reading import reading
from efficient_lmcache.report.page_sections import Section, sections
from efficient_lmcache.report.runs import Inputs

_UNDRAWN = "The plots could not be drawn: they need a browser from 2023 or later. Every number is in the tables."


def page(inputs: Inputs, analyses: Analyses, out: Path) -> str:
    """The page for a file at `out`, which its links to run directories start from.

    Raises:
        ImportError: plotly is not installed; says how to install it.
    """
    library = _library()
    link = _linker(out)
    shown = sections(inputs, analyses, link)
    drawn: dict[str, Panel] = {}
    body = joined(_section(section, drawn) for section in shown)
    head = _head(inputs, analyses, shown)
    figures = {name: {"data": panel.data, "layout": panel.layout} for name, panel in drawn.items()}
    document = element(
        "html",
        _document_head(title(inputs)),
        element(
            "body", element("div", head, element("main", body), _footer(), class_="page"), _scripts(figures, library)
        ),
        lang="en",
    )
    return f"<!doctype html>\n{document}\n"


def _linker(out: Path) -> Callable[[str], str]:
    base = out.resolve().parent

    def link(directory: str) -> str:
        relative = Path(os.path.relpath(Path(directory).resolve(), base)).as_posix()
        # "./" keeps a first part with a colon from being read as a scheme.
        return "./" + quote(relative) + "/"

    return link


@functools.cache
def _library() -> bytes:
    """plotly.js, packed: a third of its size, and browsers unpack it themselves."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError("report needs plotly: pip install 'efficient-lmcache[report]'") from error
    return gzip.compress(get_plotlyjs().encode(), 9, mtime=0)


def _document_head(name: str) -> Html:
    style = Html((resources.files(__package__) / "page.css").read_text(encoding="utf-8"))
    return element(
        "head",
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        # A page of numbers has no icon; without this, browsers ask the server for one.
        Html('<link rel="icon" href="data:,">'),
        element("title", Html(html.escape(name))),
        element("style", style),
    )


def _head(inputs: Inputs, analyses: Analyses, shown: Iterable[Section]) -> Html:
    lead, table = facts(inputs, analyses)
    contents = element("ul", joined(element("li", element("a", one.title, href=f"#{one.name}")) for one in shown))
    return element(
        "header",
        element("p", "Efficient-LMCache report", class_="kicker"),
        element("h1", title(inputs)),
        element("p", lead, class_="lead"),
        element("ul", joined(element("li", sentence) for sentence in reading(analyses)), class_="reading"),
        element("dl", joined(element("div", element("dt", k), element("dd", v)) for k, v in table), class_="facts"),
        element("nav", contents, aria_label="Contents"),
        element("p", _UNDRAWN, class_="notice", id="undrawn", hidden=""),
        element("noscript", element("p", _UNDRAWN, class_="notice")),
    )


def _section(section: Section, drawn: dict[str, Panel]) -> Html:
    parts = [_figure(part, section.name, drawn) if isinstance(part, Figure) else part for part in section.parts]
    return element("section", element("h2", section.title), joined(parts), id=section.name)


def _figure(figure: Figure, section: str, drawn: dict[str, Panel]) -> Html:
    """The figure's HTML; its panels enter `drawn` under the names of the elements that page.js draws them in."""
    panels = []
    for panel in figure.panels:
        name = f"{section}-{len(drawn) + 1}"
        drawn[name] = panel
        style = f"height:{panel.height_rem}rem" if panel.height_rem else None
        plot = element("div", id=name, class_="plot", role="img", aria_label=panel.description, style=style)
        panels.append(element("div", element("h3", panel.title), plot, class_="panel"))
    return element(
        "figure", figure.key, element("div", joined(panels), class_="panels"), element("figcaption", figure.caption)
    )


def _footer() -> Html:
    return element(
        "footer",
        element(
            "p",
            "Point at a mark to read its run, click it to open the run's directory. Drag across a plot to enlarge "
            "a part, double-click to see all of it again.",
            class_="screen",
        ),
        element("p", f"Made by efficient-lmcache {__version__} report, from the run directories' files alone."),
    )


def _scripts(figures: dict[str, Any], library: bytes) -> Html:
    # In a script element only "</" and "<!--" could end or change it.
    data = json.dumps(figures, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    code = (resources.files(__package__) / "page.js").read_text(encoding="utf-8")
    return joined(
        (
            element("script", Html(data), id="figures", type="application/json"),
            element("script", Html(base64.b64encode(library).decode()), id="library", type="application/gzip"),
            element("script", Html(code)),
        ),
        "\n",
    )
