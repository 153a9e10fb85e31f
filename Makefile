# Every target sets up what it needs first: a virtual environment in .venv with the tested versions.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
DATA := /usr/share/datasets/fashion-mnist
unexport PYTHONDONTWRITEBYTECODE  # hundreds of processes of the tests import the same modules
# Tests that kill processes mostly wait, so there are more than one at a time for each core.
TESTERS := $(shell echo $$(($$(nproc) * 3 / 2)))
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo -n)

.PHONY: demo test chaos fuzz check results-check docs data tools peers clean

demo: $(READY) data  ## train Fashion-MNIST on a rehearsed spot fleet, of which a node is taken every 15 seconds
	$(BIN)/idletrain demo

test: $(READY)  ## the whole test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TESTERS) --dist loadfile --no-loadscope-reorder --durations=20

chaos: $(READY)  ## an hour of random faults of every kind, beside the suite's own; not in CI
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m tests.chaos.storm --json benchmarks/results/storm.json

fuzz: $(READY)  ## odd bytes for every reader, from one seed, in 15 minutes; PART=1/10: the first of them; PART=60: others, 60 s each
	$(BIN)/python -m pip install -q -e '.[fuzz]' -c constraints.txt
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python tests/fuzz/campaign.py $(PART)

check: $(READY)  ## style, types and layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

results-check: $(READY)  ## name the results in benchmarks/results that are older than the code they measure
	$(BIN)/python -m benchmarks.stale

docs: $(READY)  ## the documentation, in docs/_build/html; links into other projects' docs with IDLETRAIN_DOCS_ONLINE=1
	$(BIN)/sphinx-build --builder html --nitpicky --fail-on-warning --keep-going --quiet docs docs/_build/html

# Debian's package of the data set, where it is absent and may be installed; idletrain downloads it otherwise.
data:
	@if [ ! -d $(DATA) ] && [ ! -d "$$HOME/.cache/idletrain/fashion-mnist" ] && command -v apt-get >/dev/null; then \
	    $(SUDO) apt-get update -qq && $(SUDO) apt-get install -y -qq dataset-fashion-mnist || true; \
	fi

# Debian's browser and iptables, for tests that are skipped where these are absent.
tools:
	@if ! { command -v chromedriver && command -v iptables-restore; } >/dev/null && command -v apt-get >/dev/null; then \
	    $(SUDO) apt-get update -qq && \
	    $(SUDO) apt-get install -y -qq chromium chromium-driver fonts-dejavu iptables || true; \
	fi

# What benchmarks compare with, in an environment of its own; its tests are skipped where it is absent.
peers: $(READY)
	@$(BIN)/python -m benchmarks.environment || true

$(READY): pyproject.toml infra/testbed/pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv || { $(SUDO) apt-get update -qq && $(SUDO) apt-get install -y -qq python3-venv && $(PYTHON) -m venv .venv; }
	$(BIN)/python -m pip install -q --no-compile -e '.[dev]' -e infra/testbed -c constraints.txt
	@$(BIN)/python -m compileall -qq -j 0 .venv/lib || true  # pip would use one core
	@touch $(READY)

clean:  ## remove what this file and runs made
	rm -rf .venv runs docs/_build *.egg-info
