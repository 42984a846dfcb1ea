"""Axes, units and marks that the report's figures share."""

from __future__ import annotations

import itertools
import re
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st

from efficient_lmcache.report.figures import MARKS, CapacityAxis, hover, key, marker, tier_text, time_unit, token_unit
from efficient_lmcache.report.markup import Column, Html, element, markup, table

sizes = st.lists(st.floats(0.001, 4096), min_size=1, max_size=12)


@given(sizes, st.booleans())
def test_larger_tiers_are_further_right_and_no_tier_is_leftmost(tiers, gpu_only):
    axis = CapacityAxis.of([*tiers, *([0.0] if gpu_only else [])])
    shown = [*([0.0] if gpu_only else []), *sorted(set(tiers))]
    places = [axis.place(gib) for gib in shown]
    assert places == sorted(places)
    low, high = axis.limits
    assert low < places[0]
    assert places[-1] < high


@given(sizes, st.floats(0.0005, 8192))
def test_the_shaded_region_begins_at_the_estimate_and_covers_the_tiers_above_it(tiers, estimate):
    axis = CapacityAxis.of(tiers)
    shapes = axis.shade_above(estimate)
    above = [gib for gib in tiers if gib > estimate]
    if above:
        assert shapes
        assert all(shapes[0]["x0"] <= axis.place(gib) <= shapes[0]["x1"] for gib in above)
    for gib in tiers:
        if gib < estimate and shapes:
            assert axis.place(gib) <= shapes[0]["x0"]


@given(sizes)
def test_labels_do_not_run_into_each_other(tiers):
    axis = CapacityAxis.of(tiers)
    places = axis.layout()["tickvals"]
    low, high = axis.limits
    assert all(right - left > 0.08 * (high - low) for left, right in itertools.pairwise(places))


def test_small_tiers_are_counted_in_mebibytes():
    assert CapacityAxis.of([0.0, 0.0605, 0.254]).layout()["ticktext"] == ["GPU<br>only", "62", "260"]
    assert CapacityAxis.of([5.0, 40.0]).layout()["ticktext"] == ["5", "40"]
    assert [tier_text(gib) for gib in (None, 0.0, 0.0605, 0.005, 4.5)] == ["–", "none", "62 MiB", "5.1 MiB", "4.5 GiB"]


@pytest.mark.parametrize(("largest", "suffix"), [(5, "tokens"), (50_000, "K tokens"), (5_000_000, "M tokens")])
def test_tokens_are_counted_in_what_suits_the_largest(largest, suffix):
    unit = token_unit([None, 1, largest])
    assert unit.suffix == suffix
    assert unit.of_value(None) is None


def test_long_runs_are_counted_in_minutes():
    assert time_unit([599.0]).suffix == "s"
    assert time_unit([None, 600.0]).of_value(1200.0) == 20


def test_every_admission_has_a_shape_of_its_own():
    assert len({mark.symbol for mark in MARKS.values()}) == len(MARKS)
    assert marker("none", hollow=True)["symbol"] == "circle-open"


def test_every_colour_is_named_for_light_and_for_dark():
    css = (resources.files("efficient_lmcache.report") / "page.css").read_text()
    light, dark = css.split("@media (prefers-color-scheme: dark)", 1)
    dark = dark.split("}\n}", 1)[0]
    named = set(re.findall(r"(--[\w-]+):", light))
    assert named == set(re.findall(r"(--[\w-]+):", dark))
    used = set(re.findall(r"var\((--[\w-]+)\)", css)) | {f"--{mark.colour}" for mark in MARKS.values()}
    package = resources.files("efficient_lmcache.report")
    for file in package.iterdir():
        if file.name.startswith(("figures", "page")):
            used |= {f"--{name}" for name in re.findall(r'"@([a-z-]+)"', file.read_text())}
    assert used <= named | {"--name"}


def test_a_key_shows_what_is_drawn_and_no_more():
    assert "Fixed" not in key(["none", "recompute"])
    assert "hollow" in key(["none"], repeated="none")
    assert "working-set" in key(["none"], shade=True)


@given(st.text())
def test_text_becomes_markup_only_as_text(text):
    for written in (markup(text), hover(text), element("p", text, title=text)):
        inner = re.sub(r"</?(b|br|p|sub)( title=\"[^\"]*\")?>", "", written)
        assert "<" not in inner


def test_markup_is_kept_and_nothing_is_nothing():
    assert element("p", Html("<b>x</b>"), None, 3, class_="a", hidden=None) == '<p class="a"><b>x</b>3</p>'


def test_symbols_have_their_index_set():
    assert markup("γ_H and K_G, a_b") == "γ<sub>H</sub> and K<sub>G</sub>, a_b"


def test_a_short_row_ends_in_a_cell_that_spans_the_rest():
    written = table("A caption.", [Column("Run", number=False), Column("A"), Column("B")], [["r", "why"]])
    assert '<td colspan="2">why</td>' in written
    assert 'aria-label="A caption' in written
