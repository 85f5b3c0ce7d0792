# make demo | test | slow | check | bench. Everything lives in .venv; nothing outside this folder is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# More threads than free cores slow small tensor work down by an order of magnitude.
export OMP_NUM_THREADS ?= $(shell nproc 2>/dev/null || echo 2)

.PHONY: help setup demo test slow check format bench lock clean

help:
	@echo "make demo    train on scikit-learn's digits with one digit 27x too frequent, and compare memories"
	@echo "make test    the test suite (minutes, CPU)"
	@echo "make slow    longer property and integration tests"
	@echo "make check   formatting, lint and types"
	@echo "make bench   the replacement benchmark on this machine"

$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/python -m uv pip install --quiet --python $(BIN)/python -c constraints.txt -e '.[train,onnx]' --group dev
	touch $@

setup: $(VENV)/.ready

demo: setup
	$(BIN)/duel demo

test: setup
	$(BIN)/python -m pytest

slow: setup
	$(BIN)/python -m pytest -m slow --timeout 1800

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	$(BIN)/duel bench replace

# Rewrites the pinned dependency set from pyproject.toml.
lock:
	$(BIN)/python -m uv pip compile --universal --no-header --no-annotate --no-emit-index-url --python-version 3.11 \
		--group dev pyproject.toml --extra train --extra onnx -o constraints.txt

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
