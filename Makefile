# make up: everything from nothing to a served model. make test: everything that the tests need, and the tests.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=
# Where Python may not keep what it compiled, each of a server's processes compiles all that it imports anew: that takes
# more of the processor than the whole start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: up install test check speed servers computing longest system-browser browser promtool kustomize clean
.DELETE_ON_ERROR:

up: install
	@$(BIN)/tidar up $(ARGS)

install: .venv/.installed

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or later is needed: make PYTHON=python3.12 up"; exit 1; }
	$(PYTHON) -m venv .venv

# The same steps as the image's.
.venv/.installed: pyproject.toml manifests/constraints.txt manifests/image/install.sh | .venv/bin/python
	manifests/image/install.sh --editable .venv
	@touch $@

.venv/.test-installed: pyproject.toml manifests/constraints.txt manifests/image/install.sh | .venv/bin/python
	EXTRAS=test manifests/image/install.sh --editable .venv
	@touch .venv/.installed $@

HAS_BROWSER := { for name in chromium-headless-shell chromium chromium-browser google-chrome; do command -v $$name && break; done >/dev/null 2>&1; }

# The browser test needs a Chromium: the one without windows of its own (see tests/playground/conftest.py) where the
# package manager brings it, else the system's, or Playwright's own. Packages of the system's come beside Python's.
system-browser:
	@if command -v chromium-headless-shell >/dev/null 2>&1; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 && apt-get update -qq \
		&& DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium-headless-shell fonts-dejavu-core; then :; \
	elif $(HAS_BROWSER); then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; fi >/dev/null 2>&1 || :

browser: system-browser .venv/.test-installed
	@$(HAS_BROWSER) || $(BIN)/playwright install chromium \
		|| echo "no Chromium could be installed: the browser tests will be skipped"

# The rules of Prometheus are checked by its own promtool: the system's, or one binary out of Debian's package.
promtool: .venv/.test-installed
	@if command -v promtool >/dev/null 2>&1 || [ -x $(BIN)/promtool ]; then :; \
	else cd .venv && { apt-get download -qq prometheus || { apt-get update -qq && apt-get download -qq prometheus; }; } \
		&& dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x --strip-components=3 -C bin ./usr/bin/promtool; fi >/dev/null 2>&1 \
	|| echo "no promtool could be installed: the tests of the Prometheus rules will be skipped"

# The manifests for Kubernetes are rendered by kustomize, or by kubectl, which holds it.
kustomize:
	@command -v kustomize >/dev/null 2>&1 || command -v kubectl >/dev/null 2>&1 \
	|| echo "neither kustomize nor kubectl is installed: the tests of the manifests for Kubernetes will be skipped"

check: .venv/.test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Tests that compute, and those of the page beside a recorded server in which no pace counts: two at once with a thread
# each take a third less time than one with two.
# Servers are started, killed and timed by themselves; what they leave idle, and no more, goes to the longest of the
# others.
ON_THE_PAGE := $(filter-out %/test_live.py %/test_race.py %/test_sessions.py %/test_speed.py,$(wildcard tests/playground/test_*.py))
COMPUTING := tests/tidar_core $(addprefix tests/manifests/,test_check.py test_image.py test_kuberay.py) $(ON_THE_PAGE)
LONGEST := $(addprefix tests/tidar_core/,engine/test_exact.py engine/test_exact_bf16.py kernels/test_triton_compiled.py kernels/test_triton_interpreted.py)
LEFT_OVER := $(shell chrt --idle 0 true 2>/dev/null && echo chrt --idle 0 || echo nice -n 19)
SIDE_BY_SIDE := $(BIN)/python -m pytest --numprocesses 2 --dist

# How fast the page draws is measured while nothing runs beside it.
SPEED := tests/playground/test_speed.py

test: servers longest

speed: check computing browser
	$(BIN)/python -m pytest $(SPEED) $(ARGS)

servers: speed promtool
	$(BIN)/python -m pytest $(addprefix --ignore=,$(COMPUTING) $(SPEED)) $(ARGS)

computing: .venv/.test-installed kustomize browser
	OMP_NUM_THREADS=1 $(SIDE_BY_SIDE) worksteal $(addprefix --ignore=,$(LONGEST)) $(COMPUTING) $(ARGS)

# A file each: what a file prepares for all of its tests takes minutes, and two processes would do it twice.
longest: speed
	OMP_NUM_THREADS=1 $(LEFT_OVER) $(SIDE_BY_SIDE) loadfile --no-loadscope-reorder $(LONGEST) $(ARGS)

clean:
	rm -rf .venv build dist *.egg-info
