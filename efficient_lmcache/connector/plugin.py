"""The `vllm.general_plugins` entry point: vLLM calls `register` in every one of its processes."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

_CONNECTORS = {"EfficientLMCacheConnector": "connector", "EfficientLMCacheMPConnector": "server_connector"}
_LMCACHE_TRANSFERS = "lmcache.v1.gpu_connector"


def register() -> None:
    """Make the connectors loadable by name, and give LMCache a transfer path where vLLM runs on the CPU.

    Idempotent, as vLLM may load plugins more than once in a process.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.platforms import current_platform

    for name, module in _CONNECTORS.items():
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, f"efficient_lmcache.connector.{module}", name)
    if current_platform.is_cpu() and not any(isinstance(finder, _OnLMCacheImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OnLMCacheImport())


class _OnLMCacheImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Installs the CPU transfer path once LMCache's own transfers are imported, whichever connector does so.

    Importing LMCache here instead would load numba before vLLM's worker starts, and vLLM 0.32's start-up on the CPU
    fails on llvmlite's objects (it reads `__dict__["kernel"]` of everything that is loaded).
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _LMCACHE_TRANSFERS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None:
            self._loader = spec.loader
            spec.loader = self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        assert self._loader is not None
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert self._loader is not None
        self._loader.exec_module(module)
        from efficient_lmcache.connector.lmcache_adapter import install_cpu_transfer

        install_cpu_transfer(module)
