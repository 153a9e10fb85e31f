# Every target sets up what it needs; the marker file says that it did.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test check bench clean

demo: $(READY)  ## train Fashion-MNIST on four workers of which one is taken every 15 s
	@$(BIN)/python -m idletrain.nn.data || (command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ] && \
	    apt-get install -y -qq dataset-fashion-mnist || apt-get update -qq && apt-get install -y -qq dataset-fashion-mnist) || true
	$(BIN)/idletrain launch workflows/fashion-mnist.yaml --churn 15s

test: $(READY)  ## the whole test suite
	$(BIN)/python -m pytest -q

check: $(READY)  ## style, types and layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --upgrade pip -c constraints.txt
	$(BIN)/python -m pip install -q -e '.[dev]' -c constraints.txt
	touch $(READY)

clean:  ## remove what `make` and runs made
	rm -rf .venv runs build dist *.egg-info
