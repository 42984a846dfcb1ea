# Every target sets up what it needs in .venv and reuses it afterwards; docs/install.md says what and how.
python := .venv/bin/python
ready := .venv/ready

# Set-up leaves compiling to the first use; where this is set, every server start would compile vLLM anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint test-tools test-unit test-integration miniature nightly clean

help: ## what can be made
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' Makefile

setup: $(ready) ## create .venv with vLLM and LMCache for the CPU and this package

$(ready): pyproject.toml requirements/cpu.txt scripts/setup.sh
	@bash scripts/setup.sh

demo: $(ready) ## replay coding agents under four policies and compare them (no GPU needed)
	@$(python) -m efficient_lmcache.cli demo $(ARGS)

lint: $(ready) ## check style and types
	@$(python) -m ruff check .
	@$(python) -m ruff format --check .
	@$(python) -m mypy

pytest := PATH="$(CURDIR)/.venv/tools/usr/bin:$$PATH" $(python) -m pytest

test: lint test-tools ## lint, then all tests; one of them: make test ARGS=tests/unit/test_trace.py
ifdef ARGS
	@$(pytest) $(ARGS)
else
	@$(MAKE) --no-print-directory --keep-going -j2 test-unit test-integration
endif

# Servers import vLLM most of the time, on one core; nothing of a unit test is in their way while it takes the other.
test-unit:
	@log=$$(mktemp); trap "rm -f $$log" EXIT; nice -n 19 env $(pytest) tests/unit > $$log 2>&1; status=$$?; \
	    cat $$log; exit $$status

test-integration:
	@$(pytest) tests/integration tests/gpu

test-tools: # a browser for the report's page, promtool for the alerts
	@bash scripts/test_tools.sh

miniature nightly: $(ready) ## the paper's 17 runs on two CPU cores (hours), or a subset; needs ../shared
	@bash scripts/miniature.sh $@ runs/$@

clean: ## remove .venv and all caches; runs/ stays
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
