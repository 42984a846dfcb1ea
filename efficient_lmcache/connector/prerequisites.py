"""What options name outside the engine: files and a package."""

from __future__ import annotations

import importlib.util

from efficient_lmcache.connector.options import PREFIX, ConnectorOptions, OptionError


def require_what_options_name(options: ConnectorOptions) -> None:
    """Look whether it is there, before LMCache starts.

    Raises:
        OptionError: the decision log cannot be written, the redis package is not installed, or Redis's password cannot
            be read.
    """
    if options.decision_log is not None:
        _require_writable(options.decision_log)
    if options.telemetry_transport == "redis":
        _require_redis(options)


def _require_writable(decision_log: str) -> None:
    try:
        open(decision_log, "a").close()
    except OSError as error:
        raise OptionError(
            f"kv_connector_extra_config: {PREFIX}decision_log={decision_log!r} cannot be written "
            f"({error.strerror}); allowed: null or a file in an existing, writable directory"
        ) from None


def _require_redis(options: ConnectorOptions) -> None:
    if importlib.util.find_spec("redis") is None:
        raise OptionError(
            f"kv_connector_extra_config: {PREFIX}telemetry.transport=redis needs the redis package: "
            "pip install 'efficient-lmcache[redis]'"
        )
    try:
        options.redis_settings.password()
    except OSError as error:
        raise OptionError(
            f"kv_connector_extra_config: {PREFIX}telemetry.redis_password_file cannot be read ({error}); "
            "allowed: null or a file with the password"
        ) from None
