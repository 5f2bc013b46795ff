# Every task of this repository. `make` alone lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

BIN := .venv/bin
PY := $(BIN)/python
ARGS ?=

READY := .venv/.ready

.PHONY: help
help: ## List these targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(READY) ## Make .venv with everything in it (quick when nothing changed)

$(READY): requirements.lock pyproject.toml tools/setup.sh
	@tools/setup.sh

.PHONY: proto
proto: $(READY) ## Regenerate code and image from protos/
	@$(BIN)/buf format -w protos
	@$(PY) tools/generate.py

.PHONY: lock
lock: $(READY) ## Refresh requirements.lock (ARGS=--upgrade for newest versions)
	@$(PY) tools/lock.py $(ARGS)
