# Every task of this repository; `make` alone lists them. The logic is in tools/.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

BIN := .venv/bin
PY := $(BIN)/python
READY := .venv/.ready

# Passed on to what a target runs: make test ARGS="-k grants"
ARGS ?=
# How many tests run at once.
JOBS ?= 2

.PHONY: help
help: ## List these targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(READY) ## Make .venv with everything in it (quick when nothing changed)
	@:

$(READY): requirements.lock pyproject.toml tools/setup.sh
	@tools/setup.sh

.PHONY: demo
demo: setup ## Train a model on four local participants: coordinator, storage and all
	@$(BIN)/covey demo $(ARGS)

.PHONY: vulkan
vulkan:
	@tools/install_vulkan.sh

.PHONY: test
test: setup vulkan ## Run every test except faults
	@$(BIN)/pytest -m "not faults" -n $(JOBS) --dist worksteal $(ARGS)

.PHONY: test-fast
test-fast: setup vulkan ## Run the tests that take milliseconds
	@$(BIN)/pytest -m "not faults and not slow" -n $(JOBS) --dist worksteal $(ARGS)

.PHONY: test-faults
test-faults: setup vulkan ## Run the tests that kill processes and cut connections
	@$(BIN)/pytest -m faults $(ARGS)

.PHONY: lint
lint: setup ## Check style, types, imports, contract, generated code and sizes; reports everything at once
	@$(PY) tools/lint.py

.PHONY: fix
fix: setup ## Repair what a tool can repair: style, format, contract format
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format --quiet .
	@$(BIN)/buf format . --path protos -w

.PHONY: proto
proto: setup ## Regenerate code and image from protos/
	@$(BIN)/buf format . --path protos -w
	@$(PY) tools/generate.py

.PHONY: models
models: setup ## Compile the model packages from their sources
	@$(PY) models/build.py $(ARGS)

.PHONY: extras
extras: setup ## Install each service's extra alone and import all of its modules
	@$(PY) tools/check_extras.py $(ARGS)

.PHONY: bench
bench: setup ## Measure the numbers we claim
	@$(PY) benchmarks/run.py $(ARGS)

.PHONY: lock
lock: setup ## Refresh requirements.lock (ARGS=--upgrade for the newest versions)
	@$(PY) tools/lock.py $(ARGS)

.PHONY: gpu
gpu: ## Install a software Vulkan driver, so that GPU tests run without a GPU (Debian, Ubuntu)
	@tools/apt_install.sh mesa-vulkan-drivers libvulkan1

.PHONY: ci
ci: ## What CI runs, in this checkout
	@bash .ci/run

.PHONY: clean
clean: ## Remove what builds and checks left behind (.venv stays)
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
