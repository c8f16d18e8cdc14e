# make demo   trains the grid-lookup agent on this machine's CPU
# make test   the whole test suite
#
# Every target makes the environment that it needs. PYTHON=... chooses the interpreter; by default the first >= 3.11 found.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
VENV_TPU := .venv-tpu
VENV_PARITY := .venv-parity
READY := $(VENV)/.ready
READY_TPU := $(VENV_TPU)/.ready
READY_PARITY := $(VENV_PARITY)/.ready
PYTEST_ARGS ?=

PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$python"; break; }; done)

.PHONY: help demo test lint typecheck test-tpu-compile test-parity clean

help:
	@echo "make demo              train the grid-lookup agent on this machine's CPU"
	@echo "make test              the whole test suite"
	@echo "make lint              ruff"
	@echo "make typecheck         basedpyright"
	@echo "make test-tpu-compile  compile every program for TPU topologies; needs no TPU"
	@echo "make test-parity       compare the models with transformers, on CPU"
	@echo "make clean             remove the environments and caches (not the runs)"

demo: $(READY)
	$(VENV)/bin/knittrans run configs/grid_lookup.yaml

test: $(READY)
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS)

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

typecheck: $(READY)
	$(VENV)/bin/basedpyright

test-tpu-compile: $(READY_TPU)
	$(VENV_TPU)/bin/python -c 'import libtpu'
	$(VENV_TPU)/bin/python -m pytest tests/tpu $(PYTEST_ARGS)

# transformers warns of its own future. Any build of torch will do; where pip finds one for CPU only, it is the smallest.
test-parity: $(READY_PARITY)
	$(VENV_PARITY)/bin/python -c 'import torch, transformers'
	$(VENV_PARITY)/bin/python -m pytest tests/parity -o filterwarnings=default $(PYTEST_ARGS)

# A stamp, so that nothing is installed again while pyproject.toml is the same.
$(READY): pyproject.toml
	$(call environment,$(VENV),.[dev])

$(READY_TPU): pyproject.toml
	$(call environment,$(VENV_TPU),.[dev$(comma)tpu])

$(READY_PARITY): pyproject.toml
	$(call environment,$(VENV_PARITY),.[dev$(comma)parity])

comma := ,

define environment
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 found; install one, or give PYTHON=/path/to/python" >&2; exit 1; }
	@test -x $(1)/bin/python || { echo "making $(1) with $(PYTHON)"; $(PYTHON) -m venv $(1); }
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check --editable '$(2)'
	@touch $(1)/.ready
endef

clean:
	rm -rf $(VENV) $(VENV_TPU) $(VENV_PARITY) .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
