# Everything runs in its own virtual environment, with the tested versions of all packages (constraints.txt).
VENV ?= .venv
FLOORS ?= .venv-floors
PYTHON ?= python3
PYTEST = -m pytest -n logical --maxprocesses 4 --dist worksteal

.PHONY: demo test test-all floors
demo: $(VENV)/installed
	$(VENV)/bin/lm-eval-icl demo

# Every method, command and room, in minutes.
test: $(VENV)/installed
	$(VENV)/bin/python $(PYTEST) -m "not slow"

# Every test: those of `make test` and the slow ones.
test-all: $(VENV)/installed
	$(VENV)/bin/python $(PYTEST)

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

# Runs the tests with the oldest versions that pyproject.toml declares, except those tests that compare with files made
# by the tested versions (pictures, tables).
floors: $(FLOORS)/installed
	$(FLOORS)/bin/python $(PYTEST) -m "not pinned"

$(FLOORS)/installed: pyproject.toml scripts/floors.py
	$(PYTHON) -m venv $(FLOORS)
	$(PYTHON) scripts/floors.py > $(FLOORS)/floors.txt
	$(FLOORS)/bin/pip install --quiet -c $(FLOORS)/floors.txt -e '.[dev]'
	touch $@
