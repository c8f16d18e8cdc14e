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
VENV_NEWEST := .venv-newest
VENV_PEER := .venv-peer
READY := $(VENV)/.ready
READY_TPU := $(VENV_TPU)/.ready
READY_PARITY := $(VENV_PARITY)/.ready
READY_NEWEST := $(VENV_NEWEST)/.ready
PYTEST_ARGS ?=

PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$python"; break; }; done)

# A Python at the other end of the version range, where there is one: on the PATH, or installed by pyenv or uv.
PYTHON_NEWEST ?= $(shell for python in python3.13 python3.12 \
	$$(ls -d "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.1[23].*/bin/python \
	         "$${XDG_DATA_HOME:-$$HOME/.local/share}"/uv/python/cpython-3.1[23]*/bin/python3 2>/dev/null | sort -rV); do \
	"$$python" -c 'import ensurepip, sys; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
	&& { echo "$$python"; break; }; done)

.PHONY: help demo test peer lint typecheck test-tpu-compile test-parity test-newest clean

help:
	@echo "make demo              train the grid-lookup agent on this machine's CPU"
	@echo "make test              the whole test suite"
	@echo "make peer              TransferQueue in $(VENV_PEER), for knittrans bench wire peer_python=$(VENV_PEER)/bin/python"
	@echo "make lint              ruff"
	@echo "make typecheck         basedpyright"
	@echo "make test-tpu-compile  compile every program for TPU topologies; needs no TPU"
	@echo "make test-parity       compare the models with transformers, on CPU"
	@echo "make test-newest       the core of the suite on Python 3.12 or 3.13 with the newest JAX, where one is installed"
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

# `make test` runs everything on the oldest Python that is there; pip resolves 3.11 to jax 0.10 and 3.12 or 3.13 to jax 0.12.
# This runs the tests marked `newest` at that other end: a whole run with every role's real processes; for the models cached,
# packed, scanned, rematerialised and sharded forms against plain ones, and a checkpoint; the encoder's pull-back; the sampler
# against a full forward pass; the objective and the optimizer against references; loader, weights, control channel, tools and
# the count of compilations. What else there is, pure decisions and formats, does not depend on the version.
ifeq ($(PYTHON_NEWEST),)
test-newest:
	@echo "test-newest: skipped, no Python 3.12 or 3.13 found; install one, or give PYTHON_NEWEST=/path/to/python"
else
test-newest: $(READY_NEWEST)
	$(VENV_NEWEST)/bin/python -c 'import jax, sys; print("Python", sys.version.split()[0], "with jax", jax.__version__)'
	$(VENV_NEWEST)/bin/python -m pytest -m newest --ignore tests/tpu --ignore tests/parity $(PYTEST_ARGS)
endif

# The library that `knittrans bench wire` compares with: peer_python=.venv-peer/bin/python.
peer:
	"$(PYTHON)" -m venv $(VENV_PEER)
	$(VENV_PEER)/bin/pip install -q torch==2.13.0 transferqueue

# A stamp, so that nothing is installed again while pyproject.toml is the same.
$(READY): pyproject.toml
	$(call environment,$(VENV),.[dev])

$(READY_TPU): pyproject.toml
	$(call environment,$(VENV_TPU),.[dev$(comma)tpu])

$(READY_PARITY): pyproject.toml
	$(call environment,$(VENV_PARITY),.[dev$(comma)parity])

$(READY_NEWEST): PYTHON := $(PYTHON_NEWEST)
$(READY_NEWEST): pyproject.toml
	$(call environment,$(VENV_NEWEST),.[dev])

comma := ,

define environment
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 found; install one, or give PYTHON=/path/to/python" >&2; exit 1; }
	@test -x $(1)/bin/python || { echo "making $(1) with $(PYTHON)"; $(PYTHON) -m venv $(1); }
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check --editable '$(2)'
	@touch $(1)/.ready
endef

clean:
	rm -rf $(VENV) $(VENV_TPU) $(VENV_NEWEST) $(VENV_PARITY) $(VENV_PEER) .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
