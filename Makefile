# Everything a newcomer needs: `make demo` and `make test`. A second run reinstalls nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := build/demo

.DEFAULT_GOAL := help
.PHONY: help install demo test lint pictures bench clean

help:  ## say what each target does
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

install: $(VENV)/.installed  ## create .venv and install urank into it

demo: $(VENV)/.installed  ## simulate a log, prepare, inspect, train a click model; ends with HTML reports
	@rm -rf $(DEMO)
	$(BIN)/urank simulate -o $(DEMO)/simulation --queries 3000 --seed 1
	$(BIN)/urank prepare $(DEMO)/simulation/log.parquet -o $(DEMO)/prepared
	$(BIN)/urank inspect $(DEMO)/simulation/log.parquet --html $(DEMO)/inspection.html
	$(BIN)/urank train $(DEMO)/prepared -o $(DEMO)/model --click-model monotone --truth $(DEMO)/simulation --html $(DEMO)/fit.html
	$(BIN)/urank curves $(DEMO)/model $(DEMO)/prepared -o $(DEMO)/curves.svg
	@echo "Look at $(DEMO)/inspection.html, $(DEMO)/fit.html and $(DEMO)/curves.svg"

lint: $(VENV)/.installed-dev  ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

test: lint  ## lint, then every test and doctest
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

pictures: demo  ## draw the pictures of the README again
	$(BIN)/python docs/pictures.py $(DEMO) docs/images

bench: $(VENV)/.installed-dev  ## measure speed, memory and accuracy against peers (see benchmarks/)
	$(BIN)/python -m benchmarks log
	$(BIN)/python -m benchmarks clicks

clean:  ## remove everything that make created
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
