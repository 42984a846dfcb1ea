"""Importers of recorded agent runs, one module a format."""

from __future__ import annotations

from efficient_lmcache.replay.importers.mini_swe_agent import import_mini_swe_agent

IMPORTERS = {"mini-swe-agent": import_mini_swe_agent}
