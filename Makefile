# Every target sets up what it needs: a virtual environment in .venv, made again when pyproject.toml changes.
#   PYTHON=python3.12 make demo               which Python the environment is made from
#   make test PYTEST_ARGS="-k placement"      more arguments for pytest
#   make demo ARGS="--data FILE --steps 50"   more arguments for the demo
#   PERSISTENT_OPS_PYTHON=python3 make test   use this Python as it is and install nothing (a machine without network)
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# Tests start many processes: without bytecode each would compile the package again.
export PYTHONDONTWRITEBYTECODE :=

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PYTEST_ARGS ?=

ifdef PERSISTENT_OPS_PYTHON
py := $(PERSISTENT_OPS_PYTHON)
ready :=
else
py := $(VENV)/bin/python
ready := $(VENV)/.ready
endif
cxx_sources = $(shell find cuda tests -name '*.cuh' -o -name '*.cu' -o -name '*.h' -o -name '*.cpp')

triton_releases = 3.6.0 3.7.0 3.7.1 3.8.0 3.9.0

.PHONY: help demo test test-all test-many test-memory test-triton test-gpu lint format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(ready) ## run the fused embedding exchange on all GPUs, or on 4 processes where there is none
	@$(py) -m persistent_ops demo $(ARGS)

test: $(ready) ## run tests of every operator and every error, in about 4 minutes on 2 cores
	$(py) -m pytest -m "not gpu and not slow and not many_pes" -n 4 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-all: $(ready) ## run all tests that need no GPU and no machine of their own
	$(py) -m pytest -m "not gpu and not many_pes" -n 4 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-many: $(ready) ## run every operator with 128 and 256 PEs on the host, on an idle machine
	$(py) -m pytest -m many_pes $(PYTEST_ARGS)

test-memory: $(ready) ## run the operators' tests on the host with kernels under AddressSanitizer, in guarded heaps
	$(py) tests/guarded_heap.py -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-triton: $(ready) $(triton_releases:%=$(VENV)/triton/%) ## read what each supported release of Triton compiles
	for release in $(triton_releases); do echo "Triton $$release"; \
	PYTHONPATH="$(abspath $(VENV))/triton/$$release$${PYTHONPATH:+:$$PYTHONPATH}" $(py) -m pytest tests/triton_operators/test_ptx.py $(PYTEST_ARGS); done

$(VENV)/triton/%: | $(ready)
	$(py) -m pip install --quiet --no-deps --target "$@" "triton==$*"

# A rehearsal without GPUs compiles what the tests will load on the cores that these leave idle (tests/rehearsal.py): what
# does not compile there, or is not compiled yet, the tests compile themselves. Meanwhile many worlds side by side, the
# PEs of each on one GPU; then those whose PEs have one each, where there are several. 5: no test is left.
test-gpu: $(ready) ## run the operators' tests on the GPUs (one is enough)
	@mkdir -p out
	trap 'kill $$!' ERR; \
	nice -n 19 $(py) -m pytest --backend=rehearsal -n auto --no-loadscope-reorder $(PYTEST_ARGS) > out/rehearsal.txt 2>&1 & \
	$(py) -m pytest --backend=cuda -m "not apart" -n auto --no-loadscope-reorder $(PYTEST_ARGS) || [ $$? -eq 5 ]; \
	wait $$! || true; grep 'in the compile cache' out/rehearsal.txt || tail -n 20 out/rehearsal.txt
	$(py) -m pytest --backend=cuda -m apart -n auto --no-loadscope-reorder $(PYTEST_ARGS) || [ $$? -eq 5 ]

lint: $(ready) ## check style and types: ruff, mypy, clang-format
	$(py) -m ruff check .
	$(py) -m ruff format --check .
	$(py) -m mypy
	$(dir $(py))clang-format --dry-run -Werror $(cxx_sources)

format: $(ready) ## rewrite the sources in the project's style
	$(py) -m ruff check --fix .
	$(py) -m ruff format .
	$(dir $(py))clang-format -i $(cxx_sources)

clean: ## remove the environment, caches and outputs
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.ready: pyproject.toml scripts/make_venv.sh
	@PYTHON="$(PYTHON)" bash scripts/make_venv.sh "$(VENV)"
	@touch $@
