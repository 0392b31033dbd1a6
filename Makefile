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

demo: $(VENV)/.installed  ## simulate a click log, prepare it, inspect it; ends with an HTML report
	@rm -rf $(DEMO)
	$(BIN)/urank simulate -o $(DEMO)/simulation --seed 1
	$(BIN)/urank prepare $(DEMO)/simulation/log.parquet -o $(DEMO)/prepared
	$(BIN)/urank inspect $(DEMO)/simulation/log.parquet --html $(DEMO)/report.html

lint: $(VENV)/.installed-dev  ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

test: lint  ## lint, then every test and doctest
	$(BIN)/python -m pytest -n auto

pictures: demo  ## draw the pictures of the README again
	$(BIN)/python docs/pictures.py $(DEMO) docs/images

bench: $(VENV)/.installed-dev  ## measure speed and memory against peers (see benchmarks/)
	$(BIN)/python -m benchmarks log

clean:  ## remove everything that make created
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
