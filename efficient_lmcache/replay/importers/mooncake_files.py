"""Mooncake's request traces: ``{"timestamp": ms, "input_length", "output_length", "hash_ids": [...]}`` a line.

They name no conversations: `in_lanes` guesses them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from efficient_lmcache.core.references import Ints
from efficient_lmcache.replay.importers import records
from efficient_lmcache.replay.importers.lanes import LaneGuess

BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True, eq=False)
class MooncakeRequest:
    """One request; the last of `block_ids` may be that of a partial block, `name` is its line's."""

    name: str
    start_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: Ints

    @property
    def full_block_ids(self) -> Ints:
        return self.block_ids[: self.prompt_tokens // BLOCK_TOKENS]


def parse_request(line: bytes, where: str) -> MooncakeRequest:
    """One line; `where` ends with its "line number"."""
    record = records.parse_object(line, where)
    prompt_tokens = records.integer(record, "input_length", where, least=1)
    block_ids = records.integers(record, "hash_ids", where)
    records.check_blocks(len(block_ids), prompt_tokens, BLOCK_TOKENS, "hash_ids", where)
    return MooncakeRequest(
        name=where.rpartition(": ")[2],
        start_s=records.seconds(record, "timestamp", where, required=True) / 1000,
        prompt_tokens=prompt_tokens,
        output_tokens=records.integer(record, "output_length", where),
        block_ids=block_ids,
    )


def in_lanes(requests: Iterable[MooncakeRequest]) -> Iterator[tuple[int, MooncakeRequest]]:
    """Every request, in order, with the lane that it continues or begins; a new lane has the next number from 0."""
    guess = LaneGuess()
    lanes = 0
    for request in requests:
        blocks = request.full_block_ids.tolist()
        lane = guess.find(blocks, request.prompt_tokens)
        if lane is None:
            lane, lanes = lanes, lanes + 1
        guess.set_tip(lane, blocks, request.prompt_tokens + request.output_tokens)
        yield lane, request
