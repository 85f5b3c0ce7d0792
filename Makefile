# make demo | test | slow | check | bench | performance. All of it lives in .venv and .venv-older, inside this folder.
PYTHON ?= python3
PYTHON312 ?= python3.12
VENV := .venv
OLDER := .venv-older
BIN := $(VENV)/bin
# More threads than free cores slow small tensor work down by an order of magnitude.
export OMP_NUM_THREADS ?= $(shell nproc 2>/dev/null || echo 2)

.PHONY: help setup demo test test-older slow check format hooks bench performance lock clean

help:
	@echo "make demo        train on scikit-learn's digits with one digit 27x too frequent, and compare memories"
	@echo "make test        the test suite (minutes, CPU)"
	@echo "make test-older  the same suite on Python 3.12 and the older PyTorch of constraints-torch211.txt"
	@echo "make slow        longer property and integration tests"
	@echo "make check       formatting, lint and types"
	@echo "make hooks       the same before every commit"
	@echo "make bench       the replacement and training step benchmarks on this machine"
	@echo "make performance the tables of docs/performance.md, made anew from results/"

# Each environment: the Python that creates it and the versions it is pinned to.
$(VENV)/.ready: CREATE = $(PYTHON)
$(VENV)/.ready: constraints.txt
$(OLDER)/.ready: CREATE = $(PYTHON312)
$(OLDER)/.ready: constraints-torch211.txt

$(VENV)/.ready $(OLDER)/.ready: %/.ready: pyproject.toml setup.py src/duel/replacement/turns.c src/duel/rows.c
	test -x $*/bin/python || $(CREATE) -m venv $*
	$*/bin/python -m pip install --quiet --disable-pip-version-check uv
	$*/bin/python -m uv pip install --quiet --python $*/bin/python -c $(filter constraints%,$^) \
		--reinstall-package duel-ssl -e '.[train,onnx,figures]' --group dev
	touch $@

setup: $(VENV)/.ready

demo: setup
	$(BIN)/duel demo

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

test-older: $(OLDER)/.ready
	OMP_NUM_THREADS=1 $(OLDER)/bin/python -m pytest

slow: setup
	$(BIN)/python -m pytest -m slow --timeout 1800

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

hooks: setup
	$(BIN)/pre-commit install

bench: setup
	$(BIN)/duel bench replace
	$(BIN)/duel bench step

# The tables of docs/performance.md, from results/.
performance: setup
	$(BIN)/python -m duel.benchmarks.page docs/performance.md

# Rewrites both pinned dependency sets from pyproject.toml.
COMPILE := $(BIN)/python -m uv pip compile --quiet --universal --no-header --no-annotate --no-emit-index-url \
	--no-python-downloads --group dev pyproject.toml --extra train --extra onnx --extra figures
lock:
	$(COMPILE) --python-version 3.11 -o constraints.txt
	$(COMPILE) --python-version 3.12 --constraint constraints-torch211.in -o constraints-torch211.txt

clean:
	rm -rf $(VENV) $(OLDER) .pytest_cache .mypy_cache .ruff_cache build src/*.egg-info src/duel/_compiled.*
