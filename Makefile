# make demo    a broker, a coordinator and six agents train together on this machine, over MQTT
# make test    the tests
# make nightly long tests that resemble shorter ones, and property tests with more random examples
# make card    tests on a real graphics card, where torch (or onnxruntime-gpu) sees one
# make check   style, types, layering, that the documentation builds; lists large classes
# make docs    the documentation: pages made from the code in docs/, and all of it as a site in site/

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0

export OMP_NUM_THREADS := 1
# The future of mkdocs: docs/decisions.md, mkdocs-material.
export NO_MKDOCS_2_WARNING := 1
# Tests and demo start hundreds of processes. Without bytecode files, each would compile every module: up to 0.7 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test nightly card check docs clean

demo: $(VENV)/demo
	$(BIN)/python -m fleetune.tools.demo

# Tests of processes and brokers come last, two at a time; a file stays with one worker.
test: $(VENV)/dev
	$(BIN)/python -m pytest -m 'not fleet and not nightly' -n auto --maxprocesses 4 --dist loadfile
	$(BIN)/python -m pytest -m 'fleet and not nightly' -n 2 --dist loadfile

card: $(VENV)/dev
	$(BIN)/python -m pytest tests/tools/simulator/test_real_gpu.py tests/edge_agent/training/gpu/test_onnx_on_a_real_gpu.py

# More random examples, and all methods in the large matrices; tests/helpers/nightly.py records a pass.
nightly: $(VENV)/zoo
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -m 'nightly or hypothesis' -n 2 --dist loadfile
	$(BIN)/python -m tests.helpers.nightly

check: $(VENV)/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/mkdocs build --quiet
	@$(BIN)/python tests/project/structure.py

docs: $(VENV)/dev
	$(BIN)/python -m fleetune.tools.docs
	$(BIN)/mkdocs build --quiet
	@echo site/index.html

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

# Models that others wrote, for tests/zoo.
$(VENV)/zoo: $(VENV)/dev
	mv $(VENV)/python $(VENV)/installing
	$(BIN)/pip install -qq --disable-pip-version-check -e '.[zoo]' $(TORCH)
	mv $(VENV)/installing $(VENV)/python
	touch $@ $(VENV)/dev $(VENV)/demo

clean:
	rm -rf $(VENV) runs agent-state site
