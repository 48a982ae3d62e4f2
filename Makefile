# Each target sets itself up on a fresh machine. Stamps let a second run start at once.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
INSTALL := @$(BIN)/python -m pip install --quiet --constraint constraints.txt

# The commands of the targets are in tasks.py, for systems without make.
RUN := @$(BIN)/python tasks.py --installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-exhaustive lint docs bench format clean

help:
	@echo "make demo    train on an Atari game and show the memory that the replay buffer needs"
	@echo "make test    run the tests (CI=true make test: the slow ones too)"
	@echo "make test-exhaustive  run all tests, which takes two hours"
	@echo "make lint    check format, style, imports and types"
	@echo "make docs    build the site, notebooks included, into docs/_build/html"
	@echo "make bench   run the benchmarks of the documentation; continues an interrupted run"
	@echo "make format  rewrite the sources in the project's format"
	@echo "make clean   remove build products and caches, keep $(VENV)"

$(BIN)/python:
	@$(PYTHON) -m venv $(VENV)

# torch first and alone: pip prefers a local build of the same version, such as 2.13.0+cpu, if a configured index or
# wheel folder has it (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS). The default build for Linux needs gigabytes of CUDA
# libraries.
$(VENV)/.torch: constraints.txt | $(BIN)/python
	@echo "Installing PyTorch into $(VENV)"
	$(INSTALL) torch
	@touch $@

# pip compiles some requirements of the tests, so the compiler is installed first.
$(VENV)/.extra-%: pyproject.toml constraints.txt $(VENV)/.torch
	$(if $(filter test dev,$*),scripts/install_system_packages.sh)
	@echo "Installing the packages and what 'make $*' needs"
	$(INSTALL) --editable ".[$*]"
	@touch $@

# Without this line, make would delete these as intermediate files.
.PRECIOUS: $(VENV)/.extra-%

demo: $(VENV)/.extra-demo
	$(RUN) demo

# Hundreds of processes import the packages. Writing bytecode lets only the first one compile them.
test: export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/.extra-test
	scripts/install_system_packages.sh
	$(if $(CI),scripts/make_venvs.sh)
	$(RUN) test $(SELECT)

test-exhaustive:
	$(MAKE) test CI=true SELECT='-m ""'

lint: $(VENV)/.extra-dev
	$(RUN) lint

docs: $(VENV)/.extra-docs
	$(RUN) docs

bench: $(VENV)/.extra-test
	$(BIN)/python -m benchmarks.run

format: $(VENV)/.extra-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf docs/_build docs/notebooks build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name .git -prune -o -path ./$(VENV) -prune -o -type d -name __pycache__ -print0 | xargs -0 -r rm -rf
