# Start with `make demo` and `make test`. Nothing is reinstalled on later runs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
DEMO := build/demo

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow lint docs examples pictures house figures release-check clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 16

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[report,serve]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

install: $(VENV)/.installed  ## create .venv and install urank in it

demo: $(VENV)/.installed  ## simulate a log, inspect, prepare, train and evaluate it; ends with an HTML report
	@rm -rf $(DEMO)
	$(BIN)/urank simulate -o $(DEMO)/simulation --queries 3000 --test 0.2 --seed 1
	$(BIN)/urank run $(DEMO)/simulation/log.parquet -o $(DEMO)/job --drop relevance --drop propensity --test 0.2 --truth $(DEMO)/simulation
	@echo "Open $(DEMO)/job/report.html"

lint: $(VENV)/.installed-dev  ## run ruff, mypy --strict, import-linter, and zizmor on the workflows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/zizmor --quiet --offline --strict-collection .github

test: lint  ## lint, then run the fast tests and all doctests; run before every commit
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadgroup -m "not slow"

test-slow: $(VENV)/.installed-dev  ## slow tests: golden outputs, Ray, crashes, statistics, browsers, the paper's experiments
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadgroup -m slow tests --ignore tests/ray
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow tests/ray

examples: $(VENV)/.installed-dev  ## execute the notebooks again, and store their outputs
	$(BIN)/python examples/execute.py examples/*.ipynb

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $@

docs: $(VENV)/.installed-docs  ## build the documentation site into build/site, offline; warnings are errors
	$(BIN)/python docs/build_site.py
	@echo "Open build/site/index.html"

pictures: demo  ## redraw the README's pictures
	$(BIN)/python docs/pictures.py $(DEMO) docs/images

house: $(VENV)/.installed  ## measure the state of the code: size, names, repetition, modules on each path, start-up
	$(BIN)/python -m benchmarks.house

$(VENV)/.installed-bench: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,bench]'
	@touch $@

$(PEERS)/.installed: benchmarks/peers.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --requirement benchmarks/peers.txt
	@touch $@

figures: $(VENV)/.installed-bench $(PEERS)/.installed  ## measure every figure of this commit, unattended and resumable (see benchmarks/)
	$(BIN)/python -m benchmarks figures

release-check:  ## build sdist and wheel, check them, install the wheel into a fresh venv, and run the README's Python there
	rm -rf dist build/release
	$(PYTHON) -m venv build/release/tools
	build/release/tools/bin/python -m pip install --quiet build twine
	build/release/tools/bin/python -m build --outdir dist
	build/release/tools/bin/python -m twine check --strict dist/*
	$(PYTHON) -m venv build/release/fresh
	build/release/fresh/bin/python -m pip install --quiet --constraint constraints.txt dist/*.whl
	sed -n '/^```python$$/,/^```$$/p' README.md | sed '/^```/d' > build/release/quick_start.py
	cd build/release && fresh/bin/python quick_start.py

clean:  ## remove everything that make creates
	rm -rf $(VENV) $(PEERS) .cache build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
