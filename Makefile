# The two commands of the README, and the check that guards every commit.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PATH := $(abspath $(BIN)):$(PATH)

AZURITE := .azurite/node_modules/.bin/azurite-blob

.PHONY: demo test test-fast soak image gpu null-gpu null-gpu-kit check format docs setup clean

demo: $(BIN)/.runtime ## the main job, end to end, on this machine
	@penstock demo --quick

test: setup           ## every test; more workers than two cores have, because some wait for clusters and clocks
	pytest -n 3

test-fast: setup      ## what a developer runs between edits
	pytest -n 2 tests/unit tests/property src/penstock

soak: setup $(if $(filter-out azure,$(PART)),,$(AZURITE))  ## what is too long for `make test`, an hour: PART=NAME runs a part of at most 20 minutes
	python -m tools.soak $(PART)

BUILDER ?= $(shell command -v podman || command -v buildah || command -v docker)
IMAGE ?= penstock
image:                ## the image, by podman, buildah or docker; IMAGE names it, BUILD_ARGS go to the builder
	@test -n "$(BUILDER)" || { echo "no podman, buildah or docker on this machine: install one, or name it: make image BUILDER=..."; exit 1; }
	$(BUILDER) build --file Containerfile --tag $(IMAGE) $(BUILD_ARGS) .

DEVICE ?= cuda
SIZE ?= full
OUT ?= benchmarks/results
gpu:                  ## how fast this machine's GPU is, and that it computes right: PART=speed, then PART=rest, or ROWS=a,b SECONDS=200; no setup
	$(PYTHON) benchmarks/gpu.py --device $(DEVICE) --size $(SIZE) --out $(OUT) \
	    $(if $(PART),--part $(PART)) $(if $(ROWS),--rows $(ROWS)) $(if $(SECONDS),--seconds $(SECONDS)) $(if $(RESUME),--resume)

null-gpu: setup       ## launches, waits and copies on a GPU that computes nothing, against their bounds; downloads 4.9 GB once
	python -m tools.null_gpu

null-gpu-kit: setup   ## the code of `make gpu` on a GPU that computes nothing; ROWS=a,b as there
	python -m tools.null_gpu --kit $(if $(ROWS),--rows $(ROWS)) $(if $(RESUME),--resume)

$(AZURITE):           # 365 MB, most of it telemetry: more than CI should fetch each time
	npm install --no-audit --no-fund --silent --prefix .azurite azurite@3.37.0

check: setup          ## format, lint, types, layers, sizes, links
	ruff format --check .
	ruff check .
	lint-imports --no-logo
	python tools/code_map.py --check
	python tools/size.py --check
	python -m tools.unproven --check
	python -m tools.reference --check
	python -m tools.crd --check
	python -m tools.links
	python -m tools.wrapped
	python -m tools.words
	python -m tools.null_gpu --check
	python -m tools.soak --check
	mypy

format: setup
	ruff format .
	ruff check --fix .
	python -m tools.unproven
	python -m tools.reference
	python -m tools.crd

docs: setup           ## the manual as a site in build/site; to search it: python3 -m http.server -d build/site
	zensical build --strict --clean
	python -m tools.old_addresses build/site

# What the demo needs, a third of what the tests need. Operators are built beside pip's work and the demo's.
$(BIN)/.runtime: pyproject.toml constraints.txt
	@echo "Installing Penstock with its server into $(VENV): a gigabyte, a few minutes"; start=$$(date +%s); \
	$(PYTHON) -m venv $(VENV) && \
	$(BIN)/pip install --quiet --constraint constraints.txt torch numpy && \
	{ PYTHONPATH=src nice $(BIN)/python -m penstock.nn.native >/dev/null 2>&1 </dev/null & } && \
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[serve]' && \
	echo "Installed in $$(($$(date +%s) - start)) s" && touch $@

setup: $(BIN)/.installed

$(BIN)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch numpy
	# The loader's loops in C and operators in C++, half a minute of the compilers' beside pip's work; without one
	# numpy and plain PyTorch compute.
	# torchtitan without what it depends on, thirty packages: its dataloader's base class needs no more than these.
	(PYTHONPATH=src $(BIN)/python -m penstock.data.native; PYTHONPATH=src $(BIN)/python -m penstock.nn.native || true) & \
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]' && \
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps torchtitan tyro docstring-parser; \
	status=$$?; wait; exit $$status
	touch $(BIN)/.runtime $@

clean:
	rm -rf $(VENV) runs build .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
