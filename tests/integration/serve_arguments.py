"""vLLM's own parser of `vllm serve`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

import pytest

Parse = Callable[[list[str]], Namespace]


def serve_parser() -> Parse:
    """What `vllm serve` makes of its arguments; the parser exits for what it does not accept."""
    pytest.importorskip("vllm")
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))

    def parse(arguments: list[str]) -> Namespace:
        args: Namespace = parser.parse_args(arguments)
        args.model = args.model_tag  # as `vllm serve` does before it validates
        validate_parsed_serve_args(args)
        return args

    return parse
