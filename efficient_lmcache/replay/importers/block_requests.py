"""Requests of block traces, a line each, and the lanes that they make: told by the trace, else guessed."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path

import numpy as np

from efficient_lmcache.core.references import Ints
from efficient_lmcache.replay.importers import records
from efficient_lmcache.replay.importers.lanes import LaneGuess
from efficient_lmcache.replay.importers.records import RecordError, RecordingError, Skip
from efficient_lmcache.replay.importers.tasks import BlockCall, BlockTask, pause_s

BLOCKS_UNSIZED = (
    "the size of blocks is not recorded: it is {} tokens, or the power of two that more of the first requests fit"
)
_PROBED_LINES = 100
_BLOCK_SIZES = [1 << power for power in range(15)]
_SORTED = "requests must be in the order of their times: jq -s -c 'sort_by(.timestamp)[]' does that"

Parse = Callable[[bytes, str, int], "BlockRequest"]
"""One line, where it is, and the tokens of a block; RecordError names the field that is malformed."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockRequest:
    """One request.

    Attributes:
        name: of the lane that it may begin.
        where: its file and line.
        key: what names it for the requests that continue it; None where the trace does not tell.
        continues: the key of the request that it continues, None where it begins a session.
        start_s: dispatch on the trace's clock; nan where it is not recorded.
        interval_s: from the response before to the dispatch; nan where it is not recorded.
        prompt_tokens, output_tokens: n >= 1, m >= 0.
        block_ids: of every block of the prompt, of which the last, partial one may be absent.
        full_blocks: how many of them are full.
    """

    name: str
    where: str
    key: Hashable
    continues: Hashable
    start_s: float
    interval_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: Ints
    full_blocks: int

    @property
    def full_block_ids(self) -> Ints:
        return self.block_ids[: self.full_blocks]


def block_tokens(source: Path, usual: int) -> int:
    """The size of a trace's blocks, which it does not name: the power of two that most of its first requests fit.

    `usual`, where it fits as many.
    """
    sizes: list[tuple[int, int]] = []
    for where, line in islice(records.lines(source), _PROBED_LINES):
        try:
            record = records.parse_object(line, where)
            tokens = records.integer(record, "input_length", where, least=1)
            if ids := len(records.integers(record, "hash_ids", where)):
                sizes.append((tokens, ids))
        except RecordError:
            continue  # counted or raised by whoever reads on
    return max(
        [usual, *_BLOCK_SIZES],
        key=lambda size: sum(ids in records.block_counts(tokens, size) for tokens, ids in sizes),
    )


class Lanes:
    """The lane of every request, in the trace's order.

    A request continues the lane whose latest request it names; one that names another request of a lane begins a lane
    of the same session, and one that names none before it begins a session. Where a trace tells nothing, lanes are
    guessed.

    Attributes:
        guessed: lanes that are a guess.
    """

    def __init__(self) -> None:
        self.guessed = 0
        self._guess = LaneGuess()
        self._sessions: list[int] = []  # by lane
        self._latest: list[tuple[Hashable, int | None]] = []  # by lane: its latest request's key and first full block
        self._lane_of: dict[Hashable, int] = {}
        self._absent: set[Hashable] = set()  # requests that one before them names
        self._next_session = 0
        self._latest_s: dict[int | None, float] = {}  # by lane; of requests whose lanes are guessed, under None
        self._continued = self._begun_alike = 0

    def place(self, request: BlockRequest) -> tuple[int, int]:
        """The request's lane, which has the next number from 0 where it is a new one, and its session.

        RecordingError for a request that one before it continues, or that is older than one before it.
        """
        if request.key is None:
            self._require_later(request, None)
            lane = self._guessed_lane(request)
            tokens = request.prompt_tokens + request.output_tokens
            self._guess.set_tip(lane, request.full_block_ids.tolist(), tokens)
        else:
            lane = self._told_lane(request)
            self._require_later(request, lane)
            self._lane_of[request.key] = lane
        self._latest[lane] = request.key, _first_block(request)
        return lane, self._sessions[lane]

    def require_whole_prompts(self, source: Path) -> None:
        """RecordingError where requests continue sessions, but none begins with the block that the one before it does.

        Such a trace has what each turn adds to its conversation, as AIPerf's generator of agentic code writes it.
        """
        if self._continued and not self._begun_alike:
            raise RecordingError(
                f"{source}: none of the {self._continued} requests that continue a session_id begins with the first "
                "block of the one before it: such hash_ids are of what a turn adds; they must be of the whole prompt"
            )

    def _told_lane(self, request: BlockRequest) -> int:
        lane = self._lane_of.get(request.continues) if request.continues is not None else None
        if request.key in self._absent:
            raise RecordingError(f"{request.where}: {request.name} is continued by a request before it; {_SORTED}")
        if lane is None:
            if request.continues not in (None, request.key):
                self._absent.add(request.continues)
            return self._new_lane(session=None)
        key, first_block = self._latest[lane]
        if key != request.continues:
            return self._new_lane(self._sessions[lane])
        if request.key == request.continues and first_block is not None:
            self._continued += 1
            self._begun_alike += first_block == _first_block(request)
        return lane

    def _require_later(self, request: BlockRequest, lane: int | None) -> None:
        """Who continues whom follows from the order, as far as the trace tells times."""
        latest_s = self._latest_s.get(lane, 0.0)
        if request.start_s < latest_s:
            raise RecordingError(
                f"{request.where}: timestamp is {latest_s - request.start_s:g} s before that of a request before it; "
                f"{_SORTED}"
            )
        if not math.isnan(request.start_s):
            self._latest_s[lane] = request.start_s

    def _guessed_lane(self, request: BlockRequest) -> int:
        lane = self._guess.find(request.full_block_ids.tolist(), request.prompt_tokens)
        if lane is None:
            self.guessed += 1
            return self._new_lane(session=None)
        return lane

    def _new_lane(self, session: int | None) -> int:
        if session is None:
            session, self._next_session = self._next_session, self._next_session + 1
        self._sessions.append(session)
        self._latest.append((None, None))
        return len(self._sessions) - 1


def _first_block(request: BlockRequest) -> int | None:
    return int(request.block_ids[0]) if request.full_blocks else None


def parsed(source: Path, parse: Parse, usual_block_tokens: int, skip: Skip) -> tuple[int, Iterator[BlockRequest]]:
    """The tokens of a trace's blocks, and its requests."""
    size = block_tokens(source, usual_block_tokens)
    return size, records.kept((partial(parse, line, where, size) for where, line in records.lines(source)), skip)


def lane_tasks(source: Path, requests: Iterable[BlockRequest], size: int) -> Iterator[BlockTask]:
    """Every lane, by its first request; RecordError names file, line and field of what is malformed.

    All requests are in memory: a lane's may be anywhere in the file.
    """
    placed = Lanes()
    lanes: list[list[BlockRequest]] = []
    for request in requests:
        lane, _ = placed.place(request)
        if lane == len(lanes):
            lanes.append([])
        lanes[lane].append(request)
    placed.require_whole_prompts(source)
    unnamed = count(-1, -1)
    for lane_requests in lanes:
        first = lane_requests[0]
        yield BlockTask(first.name, first.where, list(_calls(lane_requests, size, unnamed)), size, scope=None)


def _calls(requests: list[BlockRequest], size: int, unnamed: Iterator[int]) -> Iterator[BlockCall]:
    """A lane's calls; a partial block without an id gets one of its own, as nothing tells that two are equal."""
    previous: BlockRequest | None = None
    for each in requests:
        interval_s = each.interval_s
        if previous is None:
            interval_s = 0.0
        elif math.isnan(interval_s):
            interval_s = pause_s(each.start_s - previous.start_s, previous.output_tokens)
        start_s = None if math.isnan(each.start_s) else each.start_s
        ids, all_blocks = each.block_ids, -(-each.prompt_tokens // size)
        path = ids if len(ids) == all_blocks else np.append(ids, next(unnamed))
        yield BlockCall(each.prompt_tokens, each.output_tokens, path, interval_s, start_s)
        previous = each
