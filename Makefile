# make demo    a broker, a coordinator and six agents train together on this machine, over MQTT
# make test    every test
# make check   style, types, layering
# make docs    docs/map.md and docs/run-toml.md, from the code

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0

export OMP_NUM_THREADS := 1

.PHONY: demo test check docs clean

demo: $(VENV)/demo
	$(BIN)/python -m fleetune.tools.demo

test: $(VENV)/dev
	$(BIN)/python -m pytest

check: $(VENV)/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/dev
	$(BIN)/python -m fleetune.tools.docs

# A stamp says that a step came to its end, and is written last: what was interrupted begins anew.
$(VENV)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Fleetune needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv --clear $(VENV)
	touch $@

$(VENV)/demo: $(VENV)/python pyproject.toml
	mv $(VENV)/python $(VENV)/installing
	$(BIN)/pip install -qq --disable-pip-version-check -e '.[demo]'
	mv $(VENV)/installing $(VENV)/python
	touch $@

$(VENV)/dev: $(VENV)/python pyproject.toml
	mv $(VENV)/python $(VENV)/installing
	$(BIN)/pip install -qq --disable-pip-version-check $(TORCH)
	$(BIN)/pip install -qq --disable-pip-version-check -e '.[dev]' $(TORCH)
	mv $(VENV)/installing $(VENV)/python
	touch $@ $(VENV)/demo

clean:
	rm -rf $(VENV) runs agent-state
