"""The wire format of observations."""

from __future__ import annotations

from dataclasses import fields, replace

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from efficient_lmcache.core.observation import HASH_RANGE, MAX_TASK_HASHES, Observation
from efficient_lmcache.telemetry.observation import FORMAT_VERSION, MAX_OBSERVATION_BYTES, decode, encode
from efficient_lmcache.telemetry.wire import ReportError

patiently = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

SEEN = Observation("engine", 7, 60.0, (3, 5, HASH_RANGE - 1), HASH_RANGE, 9, 8, 80_000, True, received_s=12.5)
COUNT = st.integers(0, 2**63 - 1)
OBSERVATIONS = st.builds(
    Observation,
    engine_id=st.text(min_size=1, max_size=200),
    sequence=COUNT,
    window_s=st.floats(0.001, 1e6),
    task_hashes=st.sets(st.integers(0, HASH_RANGE - 1)).map(lambda tasks: tuple(sorted(tasks))),
    hash_threshold=st.just(HASH_RANGE),
    window_lookups=COUNT,
    prompt_lookups=COUNT,
    prompt_tokens=COUNT,
    pressure=st.sampled_from([None, True, False]),
)


def altered(**changes: object) -> bytes:
    payload: bytes = msgpack.packb({**msgpack.unpackb(encode(SEEN)), **changes})
    return payload


@patiently
@given(OBSERVATIONS)
def test_an_observation_survives_the_round_trip(seen: Observation) -> None:
    assert decode(encode(seen)) == seen


def test_the_time_of_receipt_does_not_travel_and_no_other_time_does() -> None:
    assert decode(encode(SEEN)) == replace(SEEN, received_s=float("-inf"))
    sent = set(msgpack.unpackb(encode(SEEN)))
    assert sent == {field.name for field in fields(Observation)} - {"received_s", "task_hashes"} | {"tasks", "version"}


@patiently
@given(st.binary(max_size=300))
def test_arbitrary_bytes_raise_nothing_but_report_error(payload: bytes) -> None:
    with pytest.raises(ReportError):
        decode(payload)


@patiently
@given(
    st.dictionaries(
        st.sampled_from([*msgpack.unpackb(encode(SEEN))]),
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(-(2**63), 2**64 - 1),
            st.floats(),
            st.text("0aé", max_size=3),
            st.binary(max_size=16),
            st.lists(st.integers(0, 9), max_size=3),
        ),
    )
)
def test_arbitrary_fields_give_a_valid_observation_or_report_error(changes: dict[str, object]) -> None:
    try:
        seen = decode(altered(**changes))
    except ReportError:
        return
    assert decode(encode(seen)) == seen


@pytest.mark.parametrize("version", [0, FORMAT_VERSION + 1, True, None])
def test_another_version_is_refused(version: object) -> None:
    with pytest.raises(ReportError, match="version"):
        decode(altered(version=version))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sequence", -1),
        ("window_lookups", 1.5),
        ("prompt_lookups", True),
        ("prompt_tokens", 2**63),
        ("window_s", 0),
        ("window_s", float("inf")),
        ("window_s", float("nan")),
        ("window_s", True),
        ("pressure", 1),
        ("engine_id", ""),
        ("tasks", b"123"),
        ("tasks", "12345678"),
        ("tasks", (3).to_bytes(8, "big") * 2),
        ("tasks", HASH_RANGE.to_bytes(8, "big")),
        ("hash_threshold", 4),
        ("hash_threshold", HASH_RANGE - 0.5),
    ],
)
def test_a_field_out_of_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ReportError, match=name):
        decode(altered(**{name: value}))


def test_tasks_may_only_be_left_out_where_there_are_too_many() -> None:
    many = replace(SEEN, task_hashes=tuple(range(MAX_TASK_HASHES)), hash_threshold=MAX_TASK_HASHES)
    payload = encode(many)
    assert len(payload) <= MAX_OBSERVATION_BYTES
    assert decode(payload).hash_threshold == MAX_TASK_HASHES
    with pytest.raises(ReportError, match="hash_threshold"):
        encode(replace(SEEN, hash_threshold=HASH_RANGE - 1, task_hashes=(1,)))


def test_an_oversized_payload_is_refused_unread() -> None:
    with pytest.raises(ReportError, match="at most"):
        decode(altered(padding="x" * MAX_OBSERVATION_BYTES))


def test_hashes_that_are_none_cannot_be_sent() -> None:
    with pytest.raises(ReportError, match="tasks"):
        encode(replace(SEEN, task_hashes=(-1,)))
