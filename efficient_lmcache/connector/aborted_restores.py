"""Scheduler side in server mode: a request that was aborted while it was being restored ends once."""

from __future__ import annotations


class AbortedRestores:
    """Keeps from vLLM the end of a store that never was one.

    Of a request that is aborted during its restore, vLLM waits for the restore's end, and gives up its blocks then.
    LMCache 0.5.6 reports the end of a store too, as for every request that has ended: before the restore's end, with
    it or after it. vLLM asserts that it knows the request, and would end with it, or would free blocks that are being
    written (LMCache#4938).
    """

    def __init__(self) -> None:
        self._restoring: set[str] = set()
        self._aborted: set[str] = set()

    def __len__(self) -> int:
        """Requests that are remembered."""
        return len(self._restoring) + len(self._aborted)

    def restore_scheduled(self, request_id: str) -> None:
        """vLLM waits for the request's restore from now on."""
        self._restoring.add(request_id)

    def request_ended(self, request_id: str, reports_store: bool) -> None:
        """It finished or was aborted; with `reports_store` the end of a store will be reported."""
        if request_id in self._restoring:
            self._restoring.discard(request_id)
            if reports_store:
                self._aborted.add(request_id)

    def expected(self, stored: set[str] | None, restored: set[str] | None) -> set[str] | None:
        """Of the requests whose stores and restores have ended: those of whose stores vLLM must hear."""
        self._restoring.difference_update(restored or ())
        if not stored or not self._aborted:
            return stored
        unexpected = stored & self._aborted
        self._aborted -= unexpected
        return stored - unexpected
