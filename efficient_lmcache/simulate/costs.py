"""What a step and a copy cost: bounds of compute, memory and link from a hardware profile and a model's shape.

    compute     2 FLOP for each weight that a token activates, 4 for each head, dimension and pair of attending tokens
    memory      the weights that a step's tokens touch, and the KV that they attend to
    link        KV copied from and to the host
    overhead    what a step and each of its calls cost whatever they compute

Compute and memory overlap, so that the longer one counts; restores and stores block the step, as LMCache's do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from efficient_lmcache.core.activated import activated_parameters, routed_experts
from efficient_lmcache.core.footprint import KVFootprint, text_config
from efficient_lmcache.simulate._engine_state import StepCosts
from efficient_lmcache.simulate.profiles import Profile

_WEIGHT_BYTES = 2
_WINDOWED = ("sliding_attention", "chunked_attention")


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one engine.

    Attributes:
        step: of a step, restores included.
        store_s, stored_token_s: for each call that a step stores for, and for each token copied to the host.
    """

    step: StepCosts
    store_s: float = 0.0
    stored_token_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a model's work is proportional to.

    Attributes:
        activated_parameters: that a token passes.
        expert_parameters: of all routed experts; 0 for a dense model.
        expert_share: of them that one token passes.
        pair_flop: of one token attending to one other, in all layers.
        footprint: of its KV.
    """

    activated_parameters: int
    expert_parameters: int
    expert_share: float
    pair_flop: int
    footprint: KVFootprint

    @classmethod
    def of(cls, config: Mapping[str, Any], kv_cache_dtype: str = "auto") -> ModelShape:
        """From a parsed Hugging Face `config.json`, with the errors of `activated_parameters` and `KVFootprint`."""
        text = text_config(config)
        experts = routed_experts(config)
        footprint = KVFootprint.from_config(config, kv_cache_dtype)
        # A window is short beside an agent's prompt: attending to it costs next to nothing.
        windowed = sum(str(kind) in _WINDOWED for kind in text.get("layer_types") or ())
        head_dim = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
        return cls(
            activated_parameters=activated_parameters(config),
            expert_parameters=experts.parameters,
            expert_share=experts.share,
            pair_flop=4 * (footprint.layers - windowed) * text["num_attention_heads"] * head_dim,
            footprint=footprint,
        )


def costs(profile: Profile, shape: ModelShape, ranks: int) -> Costs:
    """One engine of so many ranks. A measured profile's costs are its own, whatever the model."""
    hardware = profile.hardware
    if hardware is None:
        return _measured(profile)
    flop_per_s = ranks * hardware.peak_flop_per_s * profile.compute_efficiency
    bytes_per_s = profile.memory_gb_s * 1e9 * profile.memory_efficiency
    weight_s = _WEIGHT_BYTES / ranks / bytes_per_s
    kv_bytes = shape.footprint.bytes_per_token_per_rank(ranks)
    copied_token_s = kv_bytes / hardware.restore_bytes_per_s
    always_read = shape.activated_parameters - shape.expert_parameters * shape.expert_share
    return Costs(
        StepCosts(
            step_s=profile.step_s,
            sequence_s=profile.sequence_s,
            token_s=2 * shape.activated_parameters / flop_per_s,
            pair_s=shape.pair_flop / flop_per_s,
            dense_s=(always_read if shape.expert_parameters else shape.activated_parameters) * weight_s,
            experts_s=shape.expert_parameters * weight_s,
            expert_share=shape.expert_share,
            context_s=kv_bytes / bytes_per_s,
            restore_s=profile.copy_s,
            restored_token_s=copied_token_s,
        ),
        store_s=profile.copy_s,
        stored_token_s=copied_token_s,
    )


def _measured(profile: Profile) -> Costs:
    given = dict(profile.measured or {})
    stores = {name: given.pop(name) for name in ("store_s", "stored_token_s") if name in given}
    free = dict.fromkeys(StepCosts._fields, 0.0)
    return Costs(StepCosts(**{**free, "expert_share": 1.0, **given}), **stores)
