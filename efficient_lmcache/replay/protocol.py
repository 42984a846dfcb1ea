"""Names that the replay's client, its launcher and what vLLM loads agree on."""

from __future__ import annotations

FORCED_TOKENS_KEY = "efficient_lmcache.forced_tokens"  # in a request's `vllm_xargs`: the token ids to emit
TASK_ID_KEY = "efficient_lmcache.task_id"  # in a request's `kv_transfer_params`
VOCAB_SIZE_ENV = "EFFICIENT_LMCACHE_VOCAB_SIZE"  # in the server's environment
FORCED_OUTPUT_PROCESSOR = "efficient_lmcache.replay.forced_output:ForcedOutputProcessor"
