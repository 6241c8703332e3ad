# Everything runs in its own virtual environment, with the tested versions of all packages (constraints.txt).
VENV ?= .venv
FLOORS ?= .venv-floors
NEWEST ?= .venv-newest
PYTHON ?= python3
PYTEST = -m pytest -n logical --maxprocesses 4 --dist worksteal

# What the environment has besides the package: extras of pyproject.toml. CI adds cluster, for the tests of Ray.
EXTRAS ?= dev,docs

.PHONY: demo check hooks test test-plain test-all coverage papers site package floors newest
demo: $(VENV)/installed
	$(VENV)/bin/lm-eval-icl demo

# All that CI checks before the tests: lint, format, spelling, blanks, large files, types, the site.
check: $(VENV)/installed
	$(VENV)/bin/pre-commit run --all-files
	$(VENV)/bin/python -m mypy
	$(MAKE) site

# The quick ones of these before every commit.
hooks: $(VENV)/installed
	$(VENV)/bin/pre-commit install

# Every method, command and room, in minutes.
test: $(VENV)/installed
	$(VENV)/bin/python $(PYTEST) -m "not slow"

# The same tests in plain mode: every request computed alone, without the optimizations. Slow.
test-plain: $(VENV)/installed
	PLAIN=1 $(VENV)/bin/python $(PYTEST) -m "not slow"

# Every test once: those of `make test`, then the slow ones.
test-all: test
	$(VENV)/bin/python $(PYTEST) -m slow

# Which lines and branches the tests of `make test` reach, in one process: a table of what they do not.
coverage: $(VENV)/installed
	$(VENV)/bin/python -m coverage erase
	$(VENV)/bin/python -m coverage run -m pytest -m "not slow"
	$(VENV)/bin/python -m coverage combine --quiet
	$(VENV)/bin/python -m coverage report

# Every named study once, on narrow stand-ins of the papers' models: a table, and an error if a cell fails.
papers: $(VENV)/installed
	$(VENV)/bin/python scripts/papers.py papers-run

# The documentation as a site, in site/. A broken link or anchor is an error.
site: $(VENV)/installed
	$(VENV)/bin/python -m zensical build --clean --strict

# Wheel and source distribution in dist/, tried in an empty environment outside of the checkout.
package:
	bash scripts/try_package.sh

$(VENV)/installed: pyproject.toml constraints.txt
	@echo "Installing into $(VENV): some minutes."
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --no-compile -c constraints.txt -e '.[$(EXTRAS)]'
	@# On all cores, since pip compiles on one. Some files are templates, which do not compile.
	$(VENV)/bin/python -m compileall -qq -j 0 $(VENV)/lib || true
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

# Runs the same tests with the newest versions that pip finds.
newest: $(NEWEST)/installed
	$(NEWEST)/bin/python $(PYTEST) -m "not pinned"

$(NEWEST)/installed: pyproject.toml
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/pip install --quiet -e '.[dev]'
	touch $@
