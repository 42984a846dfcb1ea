"""The `efficient.*` options of `kv_connector_extra_config`, validated at start-up."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from efficient_lmcache.core.admission import AdmissionParameters
from efficient_lmcache.telemetry.redis_keys import DEPLOYMENT_PATTERN
from efficient_lmcache.telemetry.redis_settings import PASSWORD_VARIABLE, RedisSettings, check_url

PREFIX = "efficient."
_REDIS_URL = "telemetry.redis_url"


class OptionError(ValueError):
    """An option that is unknown or out of range; the message names key, value and what is allowed."""


class ConnectorOptions(BaseModel):
    """Defaults are the paper's (Table 7). An option with a dot in its name has an underscore in its attribute's."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    admission: Literal["none", "fixed", "conditioned"] = Field(
        "conditioned",
        description="Write admission. `none`: plain LMCache. `fixed`: decline every refill. "
        "`conditioned`: decline refills while the working set exceeds a full, evicting tier.",
    )
    mode: Literal["in_process", "server"] = Field(
        "in_process",
        description="Where LMCache keeps chunks. `in_process`: every engine has a tier of its own. `server`: engines "
        "share an `lmcache server`, given by `lmcache.mp.host` and `lmcache.mp.port` as for `LMCacheMPConnector`.",
    )
    server_http_url: str | None = Field(
        None,
        alias="server.http_url",
        pattern=r"^https?://[^\s/@]+(/[^\s@?#]*)?$",
        description="Where the server answers HTTP (its `--http-host` and `--http-port`); null: port 8080 of "
        "`lmcache.mp.host`. Its tier is probed there.",
    )
    write_threshold_chunks: int = Field(
        8, ge=0, description="kappa: a request that needs more new full chunks than this is a refill."
    )
    occupancy_threshold: float = Field(
        0.95, ge=0.0, le=1.0, description="theta: the tier counts as full from this share of its chunks on."
    )
    activity_window_s: float = Field(
        60.0, gt=0.0, description="A task is active, and an eviction counts, for so many seconds."
    )
    prompt_window_lookups: int = Field(
        256, ge=1, description="First lookups whose prompts enter the mean prompt length."
    )
    report_interval_s: float = Field(
        1.0, gt=0.0, description="Seconds between two tier reports of worker rank 0, or two probes of a server."
    )
    report_read_interval_s: float = Field(0.5, gt=0.0, description="The scheduler reads reports at most this often.")
    report_max_age_s: float = Field(5.0, gt=0.0, description="A report is fresh for so many seconds after its receipt.")
    telemetry_transport: Literal["local", "redis", "off"] = Field(
        "local",
        alias="telemetry.transport",
        description="How tier reports travel. `redis`: within the host as `local`, and to all of the deployment. "
        "`off`: decide by the working-set estimate alone.",
    )
    telemetry_redis_url: str | None = Field(
        None,
        alias="telemetry.redis_url",
        description="`redis://[user@]host[:port][/db]`, `rediss://…` (TLS; `?ssl_ca_certs=`, `ssl_certfile=`, "
        "`ssl_keyfile=`) or `unix://[user@]/path`. Without a password, as vLLM logs its configuration.",
    )
    telemetry_redis_password_file: str | None = Field(
        None,
        alias="telemetry.redis_password_file",
        description=f"File with the password alone, read at every connection; else `{PASSWORD_VARIABLE}` is used.",
    )
    telemetry_deployment: str = Field(
        "default",
        alias="telemetry.deployment",
        pattern=f"^{DEPLOYMENT_PATTERN}$",
        description="Engines with the same name in the same Redis are one pool.",
    )
    remote_capacity_gib: float | None = Field(
        None,
        gt=0.0,
        description="Capacity of LMCache's remote tier, for all ranks and engines, where it does not tell (a Redis "
        "tells its `maxmemory`). `null`: unknown, and then the remote tier is under no pressure.",
    )
    remote_staging_gib: float = Field(
        1.0,
        gt=0.0,
        description="Host memory per rank beside the CPU tier, for chunks that it declined, on their way to or from a "
        "remote tier. Taken with a remote tier only.",
    )
    decision_log: str | None = Field(None, description="File that receives every admission decision as a line of JSON.")

    @property
    def redis_settings(self) -> RedisSettings:
        """With `telemetry.transport: redis`."""
        assert self.telemetry_redis_url is not None, "the options are checked"
        return RedisSettings(self.telemetry_redis_url, self.telemetry_redis_password_file)

    def admission_parameters(
        self, *, chunk_tokens: int, bytes_per_token: int, capacity_bytes: int | None
    ) -> AdmissionParameters:
        """What a policy is set to, for a tier of so many bytes per rank; None while nobody knows."""
        return AdmissionParameters(
            chunk_tokens=chunk_tokens,
            bytes_per_token=bytes_per_token,
            configured_capacity_bytes=capacity_bytes,
            write_threshold_chunks=self.write_threshold_chunks,
            occupancy_threshold=self.occupancy_threshold,
            report_max_age_s=self.report_max_age_s,
            activity_window_s=self.activity_window_s,
            prompt_window_lookups=self.prompt_window_lookups,
        )

    @field_validator("telemetry_redis_url")
    @classmethod
    def _check_redis_url(cls, url: str | None) -> str | None:
        if url is not None:
            check_url(url)
        return url

    @model_validator(mode="after")
    def _check_transport(self) -> ConnectorOptions:
        if self.telemetry_transport == "redis" and self.telemetry_redis_url is None:
            raise ValueError(f"{PREFIX}telemetry.transport='redis' needs {PREFIX}{_REDIS_URL}")
        return self


def option_names() -> dict[str, str]:
    """Every option's name, without `efficient.`, and the attribute of `ConnectorOptions` that holds it."""
    return {field.alias or attribute: attribute for attribute, field in ConnectorOptions.model_fields.items()}


def parse_options(extra_config: Mapping[str, Any]) -> ConnectorOptions:
    """Read the `efficient.*` keys of `kv_connector_extra_config`; other keys belong to vLLM and LMCache.

    Nested ones count as dotted, as vLLM nests what its own dotted command-line options set.

    Raises:
        OptionError: for the first bad option, naming its key and value and what is allowed.
    """
    given = {key[len(PREFIX) :]: value for key, value in _flat(extra_config) if key.startswith(PREFIX)}
    try:
        return ConnectorOptions(**given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise OptionError(f"kv_connector_extra_config: {_message(given, first)}") from None


def _flat(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Leaves under their dotted names."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{name}", leaf) for name, leaf in _flat(value))
        else:
            yield key, value


def _message(given: Mapping[str, Any], error: Any) -> str:
    if not error["loc"]:  # of several options together
        return str(error["ctx"]["error"])
    name = str(error["loc"][0])
    # Never shown: an option of this name, whether it exists or not, invites a secret.
    value = "…" if "password" in name else repr(given.get(name))
    if name == "telemetry":
        return (
            f"{PREFIX}telemetry={value} is this option's former name; write {PREFIX}telemetry.transport=… "
            f"(allowed: {allowed_values('telemetry.transport')})"
        )
    if name == _REDIS_URL:  # its value is not shown: someone may have put a password there
        reason = error["ctx"]["error"] if error["type"] == "value_error" else f"allowed: {allowed_values(name)}"
        return f"{PREFIX}{name} is not allowed: {reason}"
    if error["type"] == "extra_forbidden":
        known = ", ".join(PREFIX + option for option in option_names())
        return f"{PREFIX}{name}={value} is not an option; allowed: {known}"
    return f"{PREFIX}{name}={value} is not allowed; allowed: {allowed_values(name)}"


def allowed_values(name: str) -> str:
    """What an option accepts, in words, for errors and for the reference."""
    field = ConnectorOptions.model_fields[option_names()[name]]
    choices = typing.get_args(field.annotation)
    if choices and all(isinstance(choice, str) for choice in choices):
        return ", ".join(choices)
    patterns = [limit.pattern for limit in field.metadata if getattr(limit, "pattern", None)]
    if patterns:
        return f"a string that matches `{patterns[0].strip('^$')}`"
    names = {int: "an integer", float: "a number", str: "a string", type(None): "null"}
    kinds = " or ".join(names[kind] for kind in (choices or (field.annotation,)))
    symbols = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = [
        f"{symbol} {getattr(limit, attribute):g}"
        for limit in field.metadata
        for attribute, symbol in symbols.items()
        if hasattr(limit, attribute)
    ]
    return " ".join([kinds, " and ".join(bounds)]).strip()
