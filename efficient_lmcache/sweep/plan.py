"""A sweep's plan, as a person writes it in YAML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from efficient_lmcache.replay.options import DEFAULT_BLOCK_TOKENS
from efficient_lmcache.sweep.requirements import Requirements

T = TypeVar("T")
# Strict, since YAML reads yes as true, which would count as 1.
Count = Annotated[int, Field(ge=1, strict=True)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
Share = Annotated[float, Field(gt=0, le=1, strict=True)]


class PlanError(ValueError):
    """A plan that cannot be read or cannot be run; the message names file, key and what is allowed."""


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


Many = Annotated[tuple[T, ...], BeforeValidator(_listed), Field(min_length=1)]  # a value, or a list of them


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ServerPlan(_Section):
    """What every run's server has in common; see `replay.options.RunOptions`.

    Attributes:
        gamma_g: instead of gpu_kv_tokens: A N / gamma_g at the plan's largest active pool, over the engines.
    """

    gpu_kv_tokens: Count | None = None
    gamma_g: Positive | None = None
    chunk_tokens: Count = 256
    block_tokens: Count = DEFAULT_BLOCK_TOKENS
    max_num_seqs: Count = 16
    max_num_batched_tokens: Count | None = None
    max_model_len_tokens: Count | None = None
    tensor_parallel: Count = 1
    gpu_memory_utilization: Share | None = None
    activity_window_s: Positive | None = None
    start_timeout_s: Positive = 900.0
    vllm_args: tuple[str, ...] = ()
    mode: Literal["in_process", "server"] = "in_process"
    lazy_offload: Annotated[bool, Field(strict=True)] = False
    engines: Count = 1
    route: Literal["load", "session"] = "load"
    telemetry: Literal["local", "redis"] | None = None

    @model_validator(mode="after")
    def _one_size(self) -> ServerPlan:
        if self.gpu_kv_tokens is not None and self.gamma_g is not None:
            raise ValueError("give gpu_kv_tokens or gamma_g, not both")
        return self


class ReplayPlan(_Section):
    """How agents are replayed; see `replay.driver.DriverOptions`."""

    time_scale: Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)] = 1.0
    label_tasks: bool = True
    call_timeout_s: Positive = 3600.0


class PredictPlan(_Section):
    """The engine's service rates, slow and fast end; see `sizing.pool.PoolModel`."""

    prefill_tokens_per_s: tuple[Positive, Positive] = (2_000.0, 50_000.0)
    output_s_per_token: tuple[Positive, Positive] = (0.02, 0.05)

    @model_validator(mode="after")
    def _rising(self) -> PredictPlan:
        for name in ("prefill_tokens_per_s", "output_s_per_token"):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(f"{name} is [{low:g}, {high:g}]; the first must not exceed the second")
        return self


class Matrix(_Section):
    """Runs: lists multiply.

    Attributes:
        host_gib, gamma_h: the host tier per rank, or the working set over it; one of them, none for `recompute`.
        connector: efficient | lmcache (unmodified; admission none).
        write_threshold_chunks, occupancy_threshold: kappa and theta.
        gpu_kv_tokens, gpu_memory_utilization, prefix_caching, mode, lazy_offload: instead of the plan's server's.
        repeats: independent runs of each combination, every one on a fresh server.
    """

    admission: Many[Literal["recompute", "none", "fixed", "conditioned"]]
    active_pool: Many[Count]
    host_gib: Many[Positive] | None = None
    gamma_h: Many[Positive] | None = None
    connector: Many[Literal["efficient", "lmcache"]] = ("efficient",)
    write_threshold_chunks: Many[Annotated[int, Field(ge=0, strict=True)]] | None = None
    occupancy_threshold: Many[Annotated[float, Field(ge=0, le=1, strict=True)]] | None = None
    gpu_kv_tokens: Many[Count] | None = None
    gpu_memory_utilization: Many[Share] | None = None
    prefix_caching: Many[bool] = (True,)
    mode: Many[Literal["in_process", "server"]] | None = None
    lazy_offload: Many[Annotated[bool, Field(strict=True)]] | None = None
    repeats: Count = 1

    @model_validator(mode="after")
    def _tier(self) -> Matrix:
        if self.host_gib is not None and self.gamma_h is not None:
            raise ValueError("give host_gib or gamma_h, not both")
        sized = self.host_gib is not None or self.gamma_h is not None
        if sized and "recompute" in self.admission:
            raise ValueError("recompute has no host tier: give it an entry of its own, without host_gib and gamma_h")
        if not sized and set(self.admission) != {"recompute"}:
            raise ValueError("host_gib or gamma_h is required for every admission but recompute")
        return self


class Plan(_Section):
    """A whole sweep.

    Attributes:
        trace, model: paths; relative ones are relative to the plan's directory.
        requires: what the machine must have.
    """

    name: Annotated[str, Field(min_length=1)]
    trace: Path | None = None
    model: Path | None = None
    requires: Requirements = Requirements()
    server: ServerPlan = ServerPlan()
    replay: ReplayPlan = ReplayPlan()
    predict: PredictPlan = PredictPlan()
    runs: Annotated[tuple[Matrix, ...], Field(min_length=1)]


def _repeated_keys(node: Any) -> Iterator[str]:
    """YAML allows a key once; PyYAML silently takes the last."""
    children = node.value if isinstance(node, yaml.SequenceNode) else []
    if isinstance(node, yaml.MappingNode):
        names = Counter(key.value for key, _ in node.value)
        yield from (f"{name} is given {count} times" for name, count in names.items() if count > 1)
        children = [value for _, value in node.value]
    for child in children:
        yield from _repeated_keys(child)


def load_plan(path: Path) -> Plan:
    """Read a plan; `trace` and `model` are then absolute, or None where the plan leaves them to the command line.

    Raises:
        PlanError: naming the file, the key and what is allowed.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content, repeated = yaml.safe_load(text), next(_repeated_keys(yaml.compose(text, yaml.SafeLoader)), None)
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    except RecursionError:  # brackets in brackets, or an anchor that holds itself
        raise PlanError(f"{path}: not a plan: nested too deep") from None
    if repeated:
        raise PlanError(f"{path}: {repeated}")
    if not isinstance(content, dict):
        raise PlanError(f"{path}: a plan is a mapping with the keys {', '.join(Plan.model_fields)}")
    try:
        plan = Plan.model_validate(content)
    except ValidationError as error:
        raise PlanError(f"{path}: {_first_problem(error)}") from None
    directory = path.resolve().parent
    placed = {name: directory / value for name in ("trace", "model") if (value := getattr(plan, name)) is not None}
    return plan.model_copy(update=placed)


def _first_problem(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    if first["type"] == "extra_forbidden":
        return f"{where} is not a key of a plan; allowed there: {', '.join(_keys_beside(first['loc']))}"
    if first["type"] == "missing":
        return f"{where} is missing"
    if first["type"] == "value_error":
        return f"{where or 'plan'}: {first['ctx']['error']}"
    return f"{where} is {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}".replace("tuple", "list")


def _keys_beside(location: tuple[int | str, ...]) -> list[str]:
    sections: dict[int | str, type[BaseModel]] = {
        "requires": Requirements,
        "server": ServerPlan,
        "replay": ReplayPlan,
        "predict": PredictPlan,
        "runs": Matrix,
    }
    section = sections.get(location[0], Plan) if len(location) > 1 else Plan
    return list(section.model_fields)
