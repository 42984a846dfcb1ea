"""How many files a process may have open: each call in flight has a connection, a proxied one two."""

from __future__ import annotations

import resource

_ENOUGH = 65_535  # as vLLM's server


def allow_open_files() -> None:
    """Raise this process's soft limit, which is 1,024 on most systems, as far as its hard limit goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(_ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
