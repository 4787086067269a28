# make run     sets everything up and shows the main job: engines, the router in front, a workload, a table
# make test    sets everything up, then lints, checks types and rooms, and runs the tests
# make bench   figures on this machine (docs/benchmarks.md says what they mean)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
SOURCES_C := $(wildcard src/warmroute/_kernel/*.c)

.PHONY: run test lint types bench lock docs clean

run: $(STAMP)
	$(BIN)/warmroute demo $(ARGS)

test: lint
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check src tests tools bench
	$(BIN)/ruff format --check src tests tools bench
	$(BIN)/mypy
	$(BIN)/python tools/check_rooms.py

bench: $(STAMP)
	$(BIN)/python bench/run.py $(ARGS)

docs: $(STAMP)
	$(BIN)/warmroute config-reference > docs/configuration.md

# The environment is made once, and again when the lock file, the package's metadata or the C code change.
$(STAMP): requirements-dev.lock pyproject.toml setup.py $(SOURCES_C)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

lock: $(STAMP)
	$(BIN)/python -m pip install --quiet pip-tools
	$(BIN)/pip-compile --quiet --no-header --no-emit-index-url --no-emit-trusted-host --no-emit-find-links --strip-extras \
	  --extra dev --output-file requirements-dev.lock pyproject.toml

clean:
	rm -rf $(VENV) build dist src/*.egg-info src/warmroute/_kernel/*.so
