from __future__ import annotations

from dataclasses import fields, replace

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from efficient_lmcache.core.tier import TierReport
from efficient_lmcache.telemetry.report import FORMAT_VERSION, MAX_PAYLOAD_BYTES, ReportError, decode, encode

patiently = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

REPORT = TierReport("engine", 7, 256, 262_144, 90, 100, 3, 40, received_s=12.5)
COUNT = st.integers(0, 2**63 - 1)
POSITIVE = st.integers(1, 2**63 - 1)
REPORTS = st.builds(
    TierReport,
    engine_id=st.text(min_size=1, max_size=200),
    sequence=COUNT,
    chunk_tokens=POSITIVE,
    chunk_bytes=POSITIVE,
    registered_chunks=COUNT,
    capacity_chunks=COUNT,
    evicted_chunks=COUNT,
    evicted_chunks_total=COUNT,
)
FIELDS = [field.name for field in fields(TierReport) if field.name != "received_s"]
OF_SERVERS = ("eviction_batch_chunks", "backing_tiers")


def altered(**changes: object) -> bytes:
    payload: bytes = msgpack.packb({**msgpack.unpackb(encode(REPORT)), **changes})
    return payload


@patiently
@given(REPORTS)
def test_a_report_survives_the_round_trip(report: TierReport) -> None:
    assert decode(encode(report)) == report


def test_the_time_of_receipt_does_not_travel() -> None:
    assert decode(encode(REPORT)) == replace(REPORT, received_s=float("-inf"))
    assert encode(REPORT) == encode(replace(REPORT, received_s=99.0))


@patiently
@given(st.binary(max_size=MAX_PAYLOAD_BYTES + 8))
def test_arbitrary_bytes_raise_nothing_but_report_error(payload: bytes) -> None:
    with pytest.raises(ReportError):
        decode(payload)


@patiently
@given(
    st.dictionaries(
        st.sampled_from(["version", *FIELDS]),
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(-(2**63), 2**64 - 1),
            st.floats(),
            st.text("0aé", max_size=3),
            st.binary(max_size=3),
            st.lists(st.integers(0, 9), max_size=3),
        ),
    )
)
def test_arbitrary_fields_give_a_valid_report_or_report_error(changes: dict[str, object]) -> None:
    try:
        report = decode(altered(**changes))
    except ReportError:
        return
    assert decode(encode(report)) == report


@patiently
@given(st.integers(0, len(encode(REPORT)) - 1))
def test_a_truncated_payload_is_refused(length: int) -> None:
    with pytest.raises(ReportError, match="not msgpack"):
        decode(encode(REPORT)[:length])


@pytest.mark.parametrize("version", [0, FORMAT_VERSION + 1, "1", True, None, 1.0])
def test_another_version_is_refused(version: object) -> None:
    with pytest.raises(ReportError, match="version"):
        decode(altered(version=version))


def test_fields_added_later_within_the_version_are_ignored() -> None:
    assert decode(altered(pinned_chunks=4, tiers=["cpu", {"name": "disk"}])) == decode(encode(REPORT))


@pytest.mark.parametrize("name", [name for name in FIELDS if name != "engine_id"])
@pytest.mark.parametrize("value", [-1, True, 1.5, "1", None, 2**63])
def test_a_count_that_is_no_count_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ReportError, match=f"^{name} is"):
        decode(altered(**{name: value}))


@pytest.mark.parametrize("name", ["chunk_tokens", "chunk_bytes"])
def test_a_chunk_without_size_is_refused(name: str) -> None:
    with pytest.raises(ReportError, match=name):
        decode(altered(**{name: 0}))


@pytest.mark.parametrize("name", [name for name in FIELDS if name not in ("rank", *OF_SERVERS)])
def test_a_missing_field_is_refused_by_name(name: str) -> None:
    content = msgpack.unpackb(encode(REPORT))
    del content[name]
    with pytest.raises(ReportError, match=f"^{name} is None"):
        decode(msgpack.packb(content))


def test_a_report_without_rank_is_the_first_ranks() -> None:
    content = msgpack.unpackb(encode(replace(REPORT, rank=3)))
    assert decode(msgpack.packb(content)).rank == 3
    del content["rank"]
    assert decode(msgpack.packb(content)).rank == 0


@pytest.mark.parametrize("name", OF_SERVERS)
def test_a_report_of_a_version_without_batches_or_tiers_behind_is_of_a_tier_without_them(name: str) -> None:
    content = msgpack.unpackb(encode(replace(REPORT, **{name: 3})))
    del content[name]
    assert getattr(decode(msgpack.packb(content)), name) == 0


@pytest.mark.parametrize("engine_id", ["", b"engine", 7])
def test_an_engine_id_that_is_no_name_is_refused(engine_id: object) -> None:
    with pytest.raises(ReportError, match="engine_id"):
        decode(altered(engine_id=engine_id))


def test_an_oversized_payload_is_refused_unread() -> None:
    with pytest.raises(ReportError, match="at most 4096"):
        decode(altered(padding="x" * MAX_PAYLOAD_BYTES))


@pytest.mark.parametrize(
    "report",
    [
        replace(REPORT, engine_id="x" * MAX_PAYLOAD_BYTES),
        replace(REPORT, engine_id="\ud800"),
        replace(REPORT, engine_id=""),
        replace(REPORT, sequence=2**64),
        replace(REPORT, evicted_chunks=1.5),  # type: ignore[arg-type]
    ],
    ids=["long id", "id outside Unicode", "no id", "sequence too large", "half an eviction"],
)
def test_what_no_reader_would_accept_is_not_encoded(report: TierReport) -> None:
    with pytest.raises(ReportError):
        encode(report)
