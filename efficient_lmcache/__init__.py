"""Efficient-LMCache: working-set-aware KV cache offloading for pools of coding agents on vLLM + LMCache."""

__version__ = "0.1.0"
