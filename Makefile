# One entry per job; `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
export PATH := $(BIN):$(PATH)

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

$(VENV)/locked: locks/uv.txt locks/dev.txt
	$(PYTHON) -m venv --clear build/bootstrap
	build/bootstrap/bin/pip install --quiet --require-hashes -r locks/uv.txt
	build/bootstrap/bin/uv venv --quiet --clear --python $(PYTHON) $(VENV)
	build/bootstrap/bin/uv pip sync --quiet --require-hashes --python $(BIN)/python locks/dev.txt
	touch $@

.PHONY: env
env: $(VENV)/locked ## the controller's environment, from the hash-pinned lock
