# The two commands of the README, and the check that guards every commit.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PATH := $(abspath $(BIN)):$(PATH)

AZURITE := .azurite/node_modules/.bin/azurite-blob

.PHONY: demo test test-fast test-azure check format setup clean

demo: setup           ## the main job, end to end, on this machine
	penstock demo

test: setup           ## every test
	pytest -n 2

test-fast: setup      ## what a developer runs between edits
	pytest -n 2 tests/unit tests/property src/penstock

test-azure: setup $(AZURITE)  ## corpora and checkpoints at az://, against a stand-in for it
	pytest -n 0 tests/azure/check_azure.py

$(AZURITE):           # 365 MB, most of it telemetry: more than CI should fetch each time
	npm install --no-audit --no-fund --silent --prefix .azurite azurite@3.37.0

check: setup          ## format, lint, types, layers, sizes
	ruff format --check .
	ruff check .
	lint-imports --no-logo
	python tools/size.py
	python tools/code_map.py --check
	mypy

format: setup
	ruff format .
	ruff check --fix .
	python tools/code_map.py

setup: $(BIN)/.installed

$(BIN)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch numpy
	# C++ operators, half a minute of the compiler's beside pip's work; without one plain PyTorch computes.
	# torchtitan without what it depends on, thirty packages: its dataloader's base class needs no more than these.
	(PYTHONPATH=src $(BIN)/python -m penstock.nn.native || true) & \
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]' && \
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps torchtitan tyro docstring-parser; \
	status=$$?; wait; exit $$status
	touch $@

clean:
	rm -rf $(VENV) runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
