# Everything runs in a virtual environment of its own, with the versions that were tested.
VENV ?= .venv
PYTHON ?= python3

.PHONY: demo test
demo: $(VENV)/installed
	$(VENV)/bin/python scripts/demo.py

test: $(VENV)/installed
	$(VENV)/bin/python -m pytest -n logical --maxprocesses 4 --dist worksteal

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@
