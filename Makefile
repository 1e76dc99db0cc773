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
	@echo "==> environment"; \
	$(PYTHON) -c 'import ensurepip' 2>/dev/null || $(PYTHON) -m lab packages; \
	$(PYTHON) -m venv --clear build/bootstrap; \
	build/bootstrap/bin/pip install --quiet --require-hashes -r locks/uv.txt; \
	build/bootstrap/bin/uv venv --quiet --clear --python $(PYTHON) $(VENV); \
	build/bootstrap/bin/uv pip sync --quiet --require-hashes --python $(BIN)/python locks/dev.txt; \
	touch $@; \
	echo "==> environment: $$SECONDS s"

.PHONY: env
env: $(VENV)/locked ## the controller's environment, from the hash-pinned lock

LAB := $(BIN)/python -m lab

.PHONY: lab lab-down doctor
lab: env ## build the lab and run site.yml -l ct200 on it
	$(LAB) up
lab-down: env ## remove all that the lab made
	$(LAB) down
doctor: ## say what this machine lacks
	@$(PYTHON) -m lab doctor

INVENTORY ?= inventories/lab
LIMIT ?= all

.PHONY: verify lint unit test test-all
verify: env ## read back what is true: INVENTORY=inventories/lab LIMIT=all DISRUPTIVE= (1 also restarts things, for a LIMIT)
	$(if $(DISRUPTIVE),$(if $(filter command environment,$(firstword $(origin LIMIT))),,$(error DISRUPTIVE=1 restarts hosts and containers, kills servers and \
	    fills /dev/shm. Say where: LIMIT=ct200)))
	$(BIN)/pytest tests/testinfra/present --inventory $(INVENTORY) --limit '$(LIMIT)' $(if $(DISRUPTIVE),--disruptive)
lint: env ## all linters
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy lab tests docs benchmarks images roles/*/library roles/*/files roles/*/action_plugins plugins
	$(BIN)/yamllint --strict .
	$(BIN)/ansible-lint
	git ls-files -z | xargs -0 grep -l --directories=skip -E '^#!/(usr/bin/env |bin/)(ba)?sh' | xargs -r shellcheck
unit: env ## unit tests
	$(BIN)/pytest tests/unit
test: env ## what CI runs: linters, unit tests, a molecule scenario per role, the whole site
	$(BIN)/python -m tests.run
test-all: env ## the same, with what is slow
	$(BIN)/python -m tests.run --all

DDTREE := build/ddtree
$(DDTREE)/locked: $(VENV)/locked images/locks/cpu-serve.txt locks/dev.txt
	@echo "==> environment of the DDTree tests"; \
	$(LAB) provide; \
	$(BIN)/uv venv --quiet --clear --python $(PYTHON) $(DDTREE); \
	$(BIN)/uv pip sync --quiet --require-hashes --python $(DDTREE) \
	    --find-links $${LAB_CACHE:-/var/cache/gpufleet-lab}/wheelhouse images/locks/cpu-serve.txt; \
	$(BIN)/uv pip install --quiet --python $(DDTREE) --no-deps images/sglang_cpu --editable images/sglang_ddtree; \
	$(BIN)/uv pip install --quiet --python $(DDTREE) --constraints locks/dev.txt pytest hypothesis; \
	touch $@; \
	echo "==> environment of the DDTree tests: $$SECONDS s"

.PHONY: ddtree
ddtree: $(DDTREE)/locked ## tests of images/sglang_ddtree, on SGLang's CPU environment: PYTEST= more words for pytest
	$(DDTREE)/bin/python -m pytest -p no:cacheprovider tests/ddtree $(PYTEST)

.PHONY: docs locks bench-site
docs: env ## write the tables of variables from the argument specs
	$(BIN)/python -m docs.generate
UV_COMPILE := $(BIN)/uv pip compile --quiet --generate-hashes --no-header --no-emit-index-url
locks: env ## resolve the locks again: the newest versions that the declarations allow
	$(UV_COMPILE) --upgrade --universal --python-version 3.11 --group dev pyproject.toml -o locks/dev.txt
	grep -oE '^uv==\S+' locks/dev.txt | $(UV_COMPILE) - -o locks/uv.txt
	$(UV_COMPILE) --python-version 3.11 --python-platform x86_64-manylinux_2_36 \
	    --excludes images/locks/cpu-serve.excludes --overrides images/locks/cpu-serve.overrides \
	    $(addprefix --find-links ,$(TORCH_WHEELS)) images/locks/cpu-serve.in -o images/locks/cpu-serve.txt
	$(BIN)/python -m images lock
bench-site: env ## measure the site on the lab; a table, and build/bench-site.json: BENCH=--from-nothing also builds it anew
	$(BIN)/python -m benchmarks.site $(BENCH)
