"""The report's page: what it holds, what it links to, what it says where data are absent, and hostile text."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
import typer
from report_sweep import SweepRun, write_sweep
from typer.testing import CliRunner

from efficient_lmcache.report.cli_report import report, write_report

HOSTILE = "<img src=x onerror=alert(1)> \"'&@none"
VOID = {"meta", "link", "br", "path"}


@dataclass
class Page(HTMLParser):
    """Elements, visible text by element, and the figures of a page."""

    text: str
    elements: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._open: list[str] = []
        self.feed(self.text)

    def __hash__(self) -> int:
        return id(self)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, {name: value or "" for name, value in attributes}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        if tag in self._open:
            while self._open.pop() != tag:
                pass
        if tag in ("td", "th", "li", "p", "dd", "h1", "h2"):
            self.texts.append(("", " "))

    def handle_data(self, data):
        self.texts.append((self._open[-1] if self._open else "", data))

    @property
    def visible(self) -> str:
        return " ".join("".join(text for tag, text in self.texts if tag not in ("script", "style")).split())

    @property
    def figures(self) -> dict[str, dict]:
        scripts = [text for tag, text in self.texts if tag == "script" and text.startswith("{")]
        return json.loads(scripts[0])

    def links(self) -> list[str]:
        return [attributes["href"] for tag, attributes in self.elements if tag == "a"]


def page_of(sweep: Path) -> Page:
    out = sweep / "report.html"
    write_report([sweep], out, [])
    return Page(out.read_text())


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> Path:
    return write_sweep(tmp_path_factory.mktemp("page") / "sweep")


@pytest.fixture(scope="module")
def small_sweep(tmp_path_factory) -> Path:
    return write_sweep(tmp_path_factory.mktemp("page") / "small", (SweepRun("recompute"),), tasks=8)


@pytest.fixture(scope="module")
def page(sweep) -> Page:
    return page_of(sweep)


def test_nothing_is_loaded_from_elsewhere(page):
    for tag, attributes in page.elements:
        assert "src" not in attributes, tag
        if tag == "link":
            assert attributes["href"].startswith("data:")
    assert all(link.startswith(("#", "./")) for link in page.links())


def test_every_run_leads_to_its_directory(page, sweep):
    directories = {path.resolve() for path in (sweep / "runs").iterdir()}
    linked = {(sweep / unquote(link)).resolve() for link in page.links() if link.startswith("./")}
    assert linked == directories


def test_every_point_names_its_run_and_leads_to_it(page, sweep):
    for name, figure in page.figures.items():
        for trace in figure["data"]:
            if trace.get("hoverinfo") != "text":
                continue
            assert len(trace["hovertext"]) == len(trace["customdata"]) == len(trace["x"]), name
            for text, address in zip(trace["hovertext"], trace["customdata"], strict=True):
                assert (sweep / unquote(address)).is_dir()
                assert text.startswith(f"<b>{Path(unquote(address)).name}</b>"), name


def test_hovering_tells_pool_tier_pressure_admission_and_values(page):
    texts = [
        text for figure in page.figures.values() for trace in figure["data"] for text in trace.get("hovertext", ())
    ]
    text = next(text for text in texts if text.startswith("<b>a8-conditioned-2.3</b>") and "makespan" in text)
    for part in (
        "Conditioned admission",
        "A 8",
        "9.7 MiB",
        "γ<sub>H</sub> 2.30",
        "makespan",
        "computed prefill",
        "declined 57 of 126",
    ):
        assert part in text


def test_every_plot_has_an_element_and_a_description(page):
    plots = {attributes["id"]: attributes for _, attributes in page.elements if attributes.get("class") == "plot"}
    assert plots.keys() == page.figures.keys()
    for name, attributes in plots.items():
        assert attributes["role"] == "img"
        assert len(attributes["aria-label"]) > 20, name


def test_every_table_has_a_caption(page):
    tags = [tag for tag, _ in page.elements]
    assert tags.count("table") == tags.count("caption") > 3


def test_the_reading_is_computed_from_the_runs(page, sweep):
    def computed(name):
        return json.loads((sweep / "runs" / name / "run.json").read_text())["computed_prefill_tokens"]

    saved = 1 - computed("a8-none-0.55") / computed("a8-none-2.3")
    assert f"cuts computed prefill by {saved:.1%}".replace("%", " %") in page.visible
    ratio = computed("a8-fixed-0.55") / computed("a8-none-0.55")
    assert f"fixed admission computes {ratio:.2f} × of offload's prefill" in page.visible
    assert "Computed prefill was inside the range made before the run in 5 of 8 predicted runs." in page.visible
    assert "Every output token of all 17 complete runs is the recorded one." in page.visible


def test_predictions_stand_beside_measurements(page):
    assert "inside" in page.visible
    assert "off by +28.2 %" in page.visible
    assert "before the run" in page.visible


def test_thresholds_and_connectors_are_told_apart_wherever_runs_are_drawn(tmp_path):
    own = SweepRun("none", gamma_h=2.3, connector="lmcache")
    runs = (SweepRun("none", gamma_h=2.3), own, *(SweepRun("conditioned", gamma_h=2.3, kappa=k) for k in (2, 16)))
    page = page_of(write_sweep(tmp_path / "sweep", runs, tasks=9))
    for section in ("predictions", "admission"):
        drawn = [trace for name, one in page.figures.items() if name.startswith(section) for trace in one["data"]]
        symbols = {text.split("<")[1][2:]: trace["marker"]["symbol"] for trace in drawn
                   for text in trace.get("hovertext", ())}  # fmt: skip
        assert symbols["a8-none-2.3"] == "circle"
        assert symbols["a8-none-2.3-lmcache"] == "cross"
        texts = {text.strip() for trace in drawn for text in trace.get("text", ())}
        assert {"κ 2", "κ 16"} <= texts
        if section == "predictions":
            ranges = [tuple(trace["x"]) for trace in drawn if "error_y" in trace]
            assert len(set(ranges)) == 4
    scatter = next(one for name, one in page.figures.items() if name.startswith("makespan"))
    assert any("κ" in note["text"] for note in scatter["layout"]["annotations"])


def test_sweeps_with_runs_of_the_same_names_are_not_mixed_up(tmp_path):
    runs = (SweepRun("none", gamma_h=2.3), SweepRun("none", gamma_h=0.5, status="pending"))
    sweeps = [write_sweep(tmp_path / name, runs, tasks=tasks) for name, tasks in (("one", 8), ("two", 9))]
    out = tmp_path / "report.html"
    write_report(sweeps, out, [])
    page = Page(out.read_text())
    for name in ("one", "two"):
        figure = next(one for _, one in page.figures.items() if f"./{name}/runs/a8-none-2.3/" in json.dumps(one))
        assert f"./{'two' if name == 'one' else 'one'}/" not in json.dumps(figure)
    assert page.visible.count("a8-none-0.5 pending") == 2
    predicted = [name for name in page.figures if name.startswith("predictions")]
    assert len(predicted) == 4  # two panels for each sweep


def test_a_line_has_one_dash_in_all_panels(tmp_path):
    runs = tuple(SweepRun("conditioned", gamma_h=gamma) for gamma in (0.55, 2.3, 1.5))
    page = page_of(write_sweep(tmp_path / "sweep", runs, tasks=9))
    dashes: dict[str, set[str]] = {}
    for name, one in page.figures.items():
        for trace in one["data"] if name.startswith("thresholds") else ():
            dashes.setdefault(trace["hovertext"][0].split("</b>")[0], set()).add(trace["line"]["dash"])
    assert len(dashes) == 3
    assert all(len(found) == 1 for found in dashes.values())
    assert len(set.union(*dashes.values())) == 3


def test_traces_of_one_name_are_told_apart(tmp_path):
    for tasks in (8, 9):
        write_sweep(tmp_path / str(tasks), (SweepRun("none", gamma_h=2.3), SweepRun("none", gamma_h=0.5)), tasks=tasks)
    out = tmp_path / "report.html"
    write_report([tmp_path / "8", tmp_path / "9"], out, [])
    page = Page(out.read_text())
    headings = [text for tag, text in page.texts if tag == "h4" and text.startswith("agents.trace (")]
    assert len(set(headings)) == 4  # capacity and makespan, each with two
    assert (
        len({text for _, text in page.texts if text.startswith("agents.trace (") and text.endswith("…): With ")}) == 2
    )


def test_a_page_has_a_few_megabytes(sweep, page):
    assert 1e6 < (sweep / "report.html").stat().st_size < 4e6


def test_text_of_runs_is_never_markup(tmp_path):
    bad = SweepRun("none", gamma_h=2.3, name=HOSTILE)
    failed = SweepRun("none", gamma_h=1.1, status="failed", error="</script><script>alert(2)</script> {{}} %{x}")
    page = page_of(write_sweep(tmp_path / "sweep", (bad, SweepRun("recompute"), failed), tasks=9))
    tags = [tag for tag, _ in page.elements]
    assert "img" not in tags
    assert tags.count("script") == 3
    assert HOSTILE in page.visible
    assert "</script><script>alert(2)</script>" in page.visible
    for figure in page.figures.values():
        for trace in figure["data"]:
            assert not any("<img" in text for text in trace.get("hovertext", ()))


def test_runs_that_are_not_complete_are_listed_and_not_drawn(tmp_path):
    runs = (
        SweepRun("none", gamma_h=2.3),
        SweepRun("none", gamma_h=0.8),
        SweepRun("none", gamma_h=1.1, status="failed", error="the server died"),
        SweepRun("none", gamma_h=0.55, status="pending"),
    )
    page = page_of(write_sweep(tmp_path / "sweep", runs, tasks=9))
    assert "a8-none-1.1 failed" in page.visible
    assert "the server died" in page.visible
    assert "a8-none-0.55 pending" in page.visible
    drawn = json.dumps([figure for name, figure in page.figures.items() if name.startswith(("capacity", "makespan"))])
    assert "a8-none-2.3" in drawn
    assert "a8-none-1.1" not in drawn


def test_absent_data_are_explained_in_a_line(small_sweep):
    page = page_of(small_sweep)
    reasons = [text for tag, text in page.texts if tag == "p" and text.startswith("Nothing to show:")]
    assert len(reasons) >= 7
    assert page.figures == {} or all(name.startswith("capacity") for name in page.figures)


def test_a_missing_plotly_names_the_extra(small_sweep, monkeypatch, tmp_path):
    from efficient_lmcache.report import page as module

    module._library.cache_clear()
    # The fault cannot be provoked where plotly is installed.
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ImportError, match=r"pip install 'efficient-lmcache\[report\]'"):
        write_report([small_sweep], tmp_path / "report.html", [])
    assert not (tmp_path / "report.html").exists()


def _invoke(*arguments: object):
    app = typer.Typer()
    app.command()(report)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_writes_the_page_and_says_its_size(small_sweep, tmp_path):
    result = _invoke(small_sweep, "-o", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert "MB" in result.stdout


@pytest.mark.parametrize(
    ("out", "words"),
    [("absent/page.html", "make it first"), (".", "is a directory"), ("taken.html", "pass --force")],
)
def test_an_output_that_cannot_be_written_is_refused_before_any_work(small_sweep, tmp_path, out, words):
    (tmp_path / "taken.html").write_text("mine")
    result = _invoke(small_sweep, "-o", tmp_path / out)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert words in result.stderr
    assert (tmp_path / "taken.html").read_text() == "mine"


def test_a_path_without_runs_is_a_users_error(tmp_path):
    result = _invoke(tmp_path, "-o", tmp_path / "page.html")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert str(tmp_path) in result.stderr
