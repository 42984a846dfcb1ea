"""What the Grafana dashboard shows: rows of panels, and their PromQL. `write_dashboard.py` makes a file of it."""

from __future__ import annotations

from dataclasses import dataclass

OURS = "efficient_lmcache:"
_ENGINES = '{model_name=~"$model", instance=~"$instance"}'
_DEPLOYMENTS = '{deployment=~"$deployment"}'
_GIB = "/ 2^30"


@dataclass(frozen=True)
class Panel:
    """A time series. `queries` maps legends to PromQL; `limit` is drawn as a red line."""

    title: str
    description: str
    unit: str
    queries: dict[str, str]
    limit: float | None = None


def gauge(name: str) -> str:
    return f"{OURS}{name}{_ENGINES}"


def rate(name: str, selector: str = _ENGINES) -> str:
    return f"rate({name}{selector}[$__rate_interval])"


def cluster(name: str) -> str:
    """Of the exporter (`efficient-lmcache telemetry export`)."""
    return f"{OURS}cluster_{name}{_DEPLOYMENTS}"


def first_ranks(name: str) -> str:
    """Ranks hold shards of the same tokens."""
    return cluster(name).replace("}", ', rank="0"}')


def working_set_tokens(active: str, mean: str) -> str:
    """(A − 1) · N̄: what the other agents reference before one returns, whatever a token's KV takes."""
    return f"clamp_min({cluster(active)} - 1, 0) * {cluster(mean)}"


def quantile(share: float, histogram: str) -> str:
    return f"histogram_quantile({share}, sum by (le, instance) ({rate(histogram + '_bucket')}))"


def by_source(source: str) -> str:
    selector = _ENGINES.replace("}", f', source="{source}"}}')
    return f"sum by (instance) ({rate('vllm:prompt_tokens_by_source_total', selector)})"


ROWS = {
    "Is the host tier large enough?": [
        Panel(
            "Pressure on the host tier, γ_H",
            "Working set over capacity. Above 1 the tier cannot hold what the pool reuses.",
            "none",
            {"{{instance}}": f"{gauge('working_set_bytes')} / {gauge('tier_capacity_bytes')}"},
            limit=1,
        ),
        Panel(
            "Working set and tier, per rank",
            "What the other agents reference before one returns, (A − 1) · N̄ · β, and what the tier holds.",
            "gbytes",
            {
                "{{instance}} working set": f"{gauge('working_set_bytes')} {_GIB}",
                "{{instance}} tier": f"{gauge('tier_capacity_bytes')} {_GIB}",
            },
        ),
        Panel(
            "Under pressure",
            "Share of decisions made while the working set exceeds a full, evicting tier. Refills are declined then.",
            "percentunit",
            {
                "{{instance}}": f"{rate(OURS + 'decisions_pressure_total')}"
                f" / sum without (outcome) ({rate(OURS + 'decisions_total')})"
            },
        ),
        Panel(
            "Occupancy",
            "Registered chunks over the tier's capacity.",
            "percentunit",
            {"{{instance}}": gauge("tier_occupancy_ratio")},
        ),
        Panel(
            "Evictions, chunks per second and rank",
            "Chunks evicted to make room.",
            "short",
            {"{{instance}}": rate(OURS + "evicted_chunks_total")},
        ),
        Panel(
            "Declined, chunks per second",
            "New full chunks of requests whose write was declined; chunks not copied as the tier held them already.",
            "short",
            {
                "{{instance}} declined": rate(OURS + "declined_chunks_total"),
                "{{instance}} already there": rate(OURS + "deduplicated_chunks_total"),
            },
        ),
    ],
    "Does offloading pay?": [
        Panel(
            "Stored and restored, tokens per second and rank",
            "Copied from GPU to host, and back.",
            "short",
            {
                "{{instance}} stored": rate(OURS + "stored_tokens_total"),
                "{{instance}} restored": rate(OURS + "restored_tokens_total"),
            },
        ),
        Panel(
            "Restored over stored, last 15 minutes",
            "Below 1 the tier writes more than anyone reads: it thrashes, or is still filling.",
            "none",
            {
                "{{instance}}": f"increase({OURS}restored_tokens_total{_ENGINES}[15m])"
                f" / increase({OURS}stored_tokens_total{_ENGINES}[15m])"
            },
            limit=1,
        ),
        Panel(
            "Prompt tokens by source, per second",
            "Computed prefill, found in the GPU's KV cache, restored from the host tier.",
            "short",
            {
                "{{instance}} computed": by_source("local_compute"),
                "{{instance}} GPU": by_source("local_cache_hit"),
                "{{instance}} host": by_source("external_kv_transfer"),
            },
        ),
    ],
    "Who is there, and who decides on what?": [
        Panel(
            "Active pool, A",
            "Tasks with a first lookup in the last minute.",
            "short",
            {"{{instance}}": gauge("active_pool_tasks")},
        ),
        Panel(
            "Mean prompt, N̄",
            "Mean length of the latest first-looked-up prompts, in tokens.",
            "short",
            {"{{instance}}": gauge("mean_prompt_tokens")},
        ),
        Panel(
            "Decisions per second",
            "No pressure, extension of a prefix that is still there, refill of context that the tier has lost.",
            "short",
            {"{{instance}} {{outcome}}": rate(OURS + "decisions_total")},
        ),
        Panel(
            "Age of the latest tier report",
            "From 5 s on the working-set estimate alone decides.",
            "s",
            {"{{instance}}": gauge("report_age_s")},
            limit=5,
        ),
        Panel(
            "Decisions without a fresh report",
            "Share of all decisions.",
            "percentunit",
            {
                "{{instance}}": f"{rate(OURS + 'decisions_stale_report_total')}"
                f" / sum without (outcome) ({rate(OURS + 'decisions_total')})"
            },
        ),
        Panel(
            "Evictions in the report's window",
            "Chunks evicted in the minute before the latest report; above 0 the tier counts as evicting.",
            "short",
            {"{{instance}}": gauge("tier_evicted_chunks_window")},
        ),
    ],
    "The pool (telemetry.transport: redis)": [
        Panel(
            "Engines of the deployment",
            "Heard by the exporter within 10 s, and those whose latest decision was under pressure.",
            "short",
            {
                "{{deployment}} alive": cluster("pool_engines"),
                "{{deployment}} under pressure": cluster("pool_engines_under_pressure"),
            },
        ),
        Panel(
            "Active pool of all engines, A",
            "Distinct tasks of all engines, and how many each engine knows of.",
            "short",
            {
                "{{deployment}}": cluster("pool_active_tasks"),
                "{{instance}} knows": gauge("pool_active_tasks"),
            },
        ),
        Panel(
            "Mean prompt of all engines, N̄",
            "In tokens, weighted by the engines' lookups, and as each engine knows it.",
            "short",
            {
                "{{deployment}}": cluster("pool_mean_prompt_tokens"),
                "{{instance}} knows": gauge("pool_mean_prompt_tokens"),
            },
        ),
        Panel(
            "Working set of the pool and its tiers, tokens",
            "(A − 1) · N̄ of all engines. A pool whose agents stay on their engines can use all tiers together; one "
            "that is spread at random, or whose engines share a tier, has room for one.",
            "short",
            {
                "{{deployment}} working set": working_set_tokens("pool_active_tasks", "pool_mean_prompt_tokens"),
                "{{deployment}} all tiers": f"sum by (deployment) ({first_ranks('tier_capacity_tokens')})",
                "{{deployment}} largest tier": f"max by (deployment) ({first_ranks('tier_capacity_tokens')})",
            },
        ),
        Panel(
            "Pressure on every tier, γ_H",
            "What an engine sees of the pool over what its own tier holds; of a shared tier, the whole pool. "
            "Above 1 the tier cannot hold it.",
            "none",
            {
                "{{engine}}/{{rank}}": f"{working_set_tokens('active_pool_tasks', 'mean_prompt_tokens')}"
                f" / {cluster('tier_capacity_tokens')}"
                f" or {working_set_tokens('pool_active_tasks', 'pool_mean_prompt_tokens')}"
                f" / on (deployment, instance, job) group_right {cluster('tier_capacity_tokens')}"
            },
            limit=1,
        ),
        Panel(
            "Occupancy of every tier",
            "By engine and rank, as published; engines that Prometheus does not scrape are here too.",
            "percentunit",
            {"{{engine}}/{{rank}}": cluster("tier_occupancy_ratio")},
        ),
        Panel(
            "Evictions of every tier, chunks per second",
            "By engine and rank, as published.",
            "short",
            {"{{engine}}/{{rank}}": rate(OURS + "cluster_tier_evicted_chunks_total", _DEPLOYMENTS)},
        ),
        Panel(
            "Age of what every engine says",
            "From 10 s on an engine is left out: it has stopped, or its telemetry does not get through.",
            "s",
            {"{{engine}}/{{rank}}": cluster("age_s")},
            limit=10,
        ),
        Panel(
            "Redis",
            "1 while the exporter, or an engine, hears it. An idle engine's value stays.",
            "short",
            {"{{deployment}} exporter": cluster("redis_up"), "{{instance}}": gauge("telemetry_redis_up")},
        ),
    ],
    "The remote tier (LMCache's remote_url)": [
        Panel(
            "Remote tier: occupancy",
            "Used memory over its capacity, as it tells it or as `efficient.remote_capacity_gib` says.",
            "percentunit",
            {"{{instance}}": gauge("remote_occupancy_ratio")},
        ),
        Panel(
            "Remote tier: under pressure",
            "Share of its own decisions made while the working set exceeds a full, evicting remote tier.",
            "percentunit",
            {
                "{{instance}}": f"{rate(OURS + 'remote_decisions_pressure_total')}"
                f" / sum without (outcome) ({rate(OURS + 'remote_decisions_total')})"
            },
        ),
        Panel(
            "Remote tier: chunks per second",
            "Declined; written although the host tier declined them; restored and kept out of the host tier.",
            "short",
            {
                "{{instance}} declined": rate(OURS + "remote_declined_chunks_total"),
                "{{instance}} remote only": rate(OURS + "remote_only_chunks_total"),
                "{{instance}} not promoted": rate(OURS + "unpromoted_chunks_total"),
            },
        ),
    ],
    "The engines": [
        Panel(
            "Requests",
            "In the batch, and waiting for a place in it.",
            "short",
            {
                "{{instance}} running": f"vllm:num_requests_running{_ENGINES}",
                "{{instance}} waiting": f"vllm:num_requests_waiting{_ENGINES}",
            },
        ),
        Panel(
            "Time in the queue",
            "Median and 95th percentile.",
            "s",
            {
                "{{instance}} median": quantile(0.5, "vllm:request_queue_time_seconds"),
                "{{instance}} p95": quantile(0.95, "vllm:request_queue_time_seconds"),
            },
        ),
        Panel(
            "Time in prefill",
            "Median and 95th percentile; restoring counts as prefill.",
            "s",
            {
                "{{instance}} median": quantile(0.5, "vllm:request_prefill_time_seconds"),
                "{{instance}} p95": quantile(0.95, "vllm:request_prefill_time_seconds"),
            },
        ),
        Panel(
            "GPU KV cache in use",
            "By running requests.",
            "percentunit",
            {"{{instance}}": f"vllm:kv_cache_usage_perc{_ENGINES}"},
        ),
        Panel(
            "Preemptions per second",
            "Requests put back because the GPU's KV cache was full; they are computed again.",
            "short",
            {"{{instance}}": rate("vllm:num_preemptions_total")},
        ),
        Panel(
            "Time to the first token",
            "Median and 95th percentile.",
            "s",
            {
                "{{instance}} median": quantile(0.5, "vllm:time_to_first_token_seconds"),
                "{{instance}} p95": quantile(0.95, "vllm:time_to_first_token_seconds"),
            },
        ),
    ],
}
