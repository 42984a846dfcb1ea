"""What the model's context allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_driver_run import options, write_config

from efficient_lmcache.replay.driver import ReplayOptionError
from efficient_lmcache.replay.preflight import max_model_len_tokens, read_model


def served_tokens(model: Path, **config: Any) -> int:
    write_config(model, **config)
    return max_model_len_tokens(options(model, model / "trace"), read_model(model), longest_tokens=130)


def test_the_servers_context_is_whole_blocks_within_the_models_own(tmp_path: Path) -> None:
    assert served_tokens(tmp_path) == 256
    assert served_tokens(tmp_path, max_position_embeddings=200) == 200


def test_a_context_that_vllm_derives_from_a_factor_is_left_to_vllm(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert served_tokens(tmp_path, max_position_embeddings=100, rope_scaling=yarn) == 256
    assert served_tokens(tmp_path, max_position_embeddings=100, rope_parameters=yarn) == 256


def test_a_context_that_already_includes_its_factor_is_the_models_own(tmp_path: Path) -> None:
    llama3 = {"rope_type": "llama3", "factor": 8.0}
    with pytest.raises(ReplayOptionError, match=r"longest call has 130 tokens .* takes 100"):
        served_tokens(tmp_path, max_position_embeddings=100, rope_scaling=llama3)
