.DEFAULT_GOAL := help
.PHONY: help setup env demo test test-all soak check audit format protos lock ci-tools gpu-check bench bench-small bench-peers images

# The first Python that is new enough; PYTHON=… overrides it.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
SOURCES := specdec draft_service target_service orchestrator tools

# Many small matrices: more threads than one only wait for each other, and the tests run several processes.
# Nor is what pytest and the services compile of their sources thrown away, where a shell wants that of everything.
TEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
# For tests that measure nothing: two at a time, the longer queue helps the shorter one.
PARALLEL := -n 2 --dist worksteal
# Also for those that start processes; a file's tests share them and run on one worker, in the order of the files: short ones come last.
BY_FILE := -n 2 --dist loadfile --no-loadscope-reorder

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

setup: env ## Python environment in .venv, compiled kernels, models in models/; costs nothing when all are current
	@$(BIN)/python tools/build_kernels.py
	@$(BIN)/python tools/prepare_models.py

env:
	@$(if $(PYTHON),$(PYTHON) tools/setup_env.py,echo "Python 3.11 or newer is needed: make setup PYTHON=/path/to/python"; exit 1)

demo: setup ## the three services on this machine, with and without speculation
	@$(BIN)/specdec demo

test: setup ## every test but the long ones, twelve minutes on two cores
	@$(TEST) $(PARALLEL) -m "(unit or chart) and not long"
	@$(TEST) $(BY_FILE) -m "not (unit or chart or alone or long)"
	@$(TEST) -m "alone and not long"

test-all: setup ## every test
	@$(TEST) $(PARALLEL) -m "unit or chart"
	@$(TEST) $(BY_FILE) -m "not (unit or chart or alone)"
	@$(TEST) -m "alone"

MINUTES ?= 20
soak: setup ## everything that can go wrong, for MINUTES=20: kills, cut wires, crowds, slow readers; nothing may be left
	@$(BIN)/python tools/soak.py --minutes $(MINUTES)

gpu-check: env ## the engine on this machine's GPU: is it right, and how far from the memory's speed
	@$(BIN)/python -m specdec.bench.gpu_check
	@$(BIN)/python -m tests.gpu_service

bench: setup ## with and without speculation on this machine: ratios, times, texts; BENCH="--out FILE …" adds flags
	@$(BIN)/specdec bench $(BENCH)

SWEEP ?= build/bench-small
bench-small: setup ## a small sweep of the real pair in ten minutes: SWEEP=build/bench-small gets report.html; goes on where it ended
	@mkdir -p $(SWEEP)
	@$(BIN)/specdec bench --kinds code,creative --temperature 0,1 --concurrency 1,4 --prompt-tokens 48,384 --max-tokens 24,96 \
		--repeats 3 --batch 2 --slo-ttft-ms 1000 --slo-itl-ms 50 --out $(SWEEP) $(BENCH)

bench-peers: setup ## ours and other engines in turn on the same two cores; writes docs/benchmarks.md; BENCH="--fresh …" adds flags
	@$(BIN)/python tools/bench_peers.py $(BENCH)

images: ## container images with docker or podman; IMAGES="--registry … --tag … --cuda --push" adds flags
	@$(PYTHON) tools/build_images.py $(IMAGES)

check: env ## all gates: format, lint, types, walls, protos
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(SOURCES)
	$(BIN)/lint-imports
	$(BIN)/python tools/walls.py
	$(BIN)/python tools/audit.py
	cd proto && ../$(BIN)/buf lint
	$(BIN)/python tools/protos.py --check
	$(BIN)/python tools/chart_settings.py --check

audit: env ## the lock against pyproject.toml and .venv, then against known vulnerabilities (pip-audit, asks the network)
	@$(BIN)/python tools/audit.py --vulnerabilities

format: env ## rewrites the sources as the gates want them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

protos: env ## generates specdec/v1 from proto/
	$(BIN)/python tools/protos.py

lock: env ## adds what pyproject.toml asks for to .venv and writes down the result
	$(BIN)/pip install -e '.[model,tools,dev]'
	{ echo "# The exact set that is built and tested; 'make lock' writes it."; \
	  $(BIN)/pip freeze --all --exclude-editable | sed 's/+cpu$$//' | grep -v '^pip=='; } > requirements.lock

# What the tests need from Debian: a C++ compiler, where there is none, and Prometheus. Every other tool comes from the lock.
DEBIAN_TOOLS := $(strip $(if $(shell command -v g++ || command -v c++ || command -v clang++),,g++) \
	$(if $(shell command -v prometheus),,prometheus))

ci-tools: ## installs what the tests need from Debian
	@$(if $(DEBIAN_TOOLS),apt-get update && apt-get install -y --no-install-recommends $(DEBIAN_TOOLS),echo "ci-tools: nothing is needed from Debian")
