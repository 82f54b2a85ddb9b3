# `make help` lists the targets.  Each one sets up what it needs and is quick when nothing changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1
export JUPYTER_PLATFORM_DIRS ?= 1
export HF_HUB_OFFLINE ?= 1
# What runs again, in a worker, a kernel or a child, compiles nothing again.
unexport PYTHONDONTWRITEBYTECODE
# The stored outputs are those of the rehearsal device, static: the same on every machine.
ON_REHEARSAL := CUDA_VISIBLE_DEVICES= CUDALENS_WIDGETS=0

# How much the tests try: quick, thorough (as CI) or all; tests/amount.py has the numbers.
export CUDALENS_TESTS ?= quick
# Branch coverage takes half as long again: only a thorough run measures it.
COVER ?= $(if $(filter thorough,$(CUDALENS_TESTS)),--cov=cudalens --cov-branch --cov-report=)
# One more than there are cores: some tests wait for a process of their own.
WORKERS ?= $(shell expr $$(nproc 2>/dev/null || echo 1) + 1)
# Minutes that each half of `make mutate` goes on; 10000 are enough for every mutant.
MINUTES ?= 25
INTO_EMPTY = $(BIN)/python -m pip --python build/package/bin/python install --quiet --disable-pip-version-check --no-compile

.PHONY: help setup demo test lint types unit quick notebooks notebooks-update pages-update browser test-browser pictures test-all compat package coverage mutate soak libraries bench test-cuda-host test-gpu hardware clean colab docs
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

setup: $(STAMP) ## create the virtual environment with the pinned packages

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,dev]"
	touch $@

demo: $(STAMP) ## show the main job on one failing cell; writes demo/report.html
	$(BIN)/python -m cudalens demo

lint: $(STAMP) ## ruff
	$(BIN)/ruff check .

types: $(STAMP) ## mypy, strict
	$(BIN)/mypy

unit: $(STAMP) ## the tests without the notebooks
	mkdir -p build
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --junitxml=build/junit.xml -m "not gpu and not browser" $(COVER)
ifneq ($(COVER),)
	@echo "branch coverage in per cent, at least 92 asked; then that of the simulated device alone:"
	@$(BIN)/python -m coverage report --omit="*/simulate/*" --format=total --fail-under=92
	@$(BIN)/python -m coverage report --include="*/simulate/*" --format=total
endif

notebooks: $(STAMP) ## run the notebooks and compare their stored outputs
	$(ON_REHEARSAL) $(BIN)/python -m pytest -n 2 --dist loadfile -p no:randomly --nbval --nbval-sanitize-with tests/nbval_sanitize.cfg --nbval-cell-timeout=120 --override-ini "addopts=" notebooks

notebooks-update: $(STAMP) ## run the notebooks and store their outputs; NAMES="quickstart …" for some
	$(ON_REHEARSAL) $(BIN)/python -m tests.notebook_outputs $(NAMES)

pages-update: $(STAMP) ## write the reports on the pages of docs/errors and the pages of docs/reference anew
	$(ON_REHEARSAL) CUDALENS_UPDATE_PAGES=1 $(BIN)/python -m pytest tests/test_error_pages.py tests/test_docs.py -k "blocks_of_a_page or current"

SITE = build/docs-env
$(SITE)/.installed: docs/requirements.txt docs/constraints.txt
	test -x $(SITE)/bin/python || $(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	touch $@

docs: $(SITE)/.installed ## the documentation site, strictly, into build/site; needs no torch
	rm -rf build/site
	$(SITE)/bin/python -m sphinx -W --keep-going -n -E -q -d build/doctrees -c docs . build/site
	@echo "build/site/index.html"

COLAB = $(CURDIR)/build/colab/site-packages
ON_COLAB = $(addprefix tests/,notebook/test_magics.py notebook/test_checked_cells.py notebook/test_timed_cells.py notebook/test_kernel.py render/test_widget.py)

$(COLAB)/.installed: $(STAMP) tests/colab.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(COLAB) -r tests/colab.txt
	touch $@

colab: $(COLAB)/.installed ## the front end on the IPython, kernel and widgets that Colab has
	PYTHONPATH=$(COLAB) CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -n auto --dist loadfile -m "not browser" -k "not hostile" $(ON_COLAB)

test: lint types unit notebooks ## everything that needs Python alone; CI runs it with CUDALENS_TESTS=thorough

test-all: ## as test, with more of everything and torch's whole operator database
	$(MAKE) test CUDALENS_TESTS=all

quick: $(STAMP) ## the tests of one module, in seconds: FILE=cudalens/guards/process.py
	@test -f "$(FILE)" || { echo 'make quick FILE=cudalens/guards/process.py: "$(FILE)" is no file'; exit 2; }
	@tests=$$($(BIN)/python -m tests.quick $(FILE)) || exit 2; set -x; \
	$(BIN)/ruff check $(FILE) $$tests && CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -q $$tests

compat: $(STAMP) ## the tests on other Pythons and torches, 3 GB each; writes docs/compatibility.md; LANES="3.12:2.8.0"
	$(BIN)/python -m tests.compat $(LANES)
	$(BIN)/python -m tests.cuda_host all

$(VENV)/.browser: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[browser]"
	command -v chromium || command -v chromium-browser || command -v google-chrome || (apt-get update --quiet && apt-get install --yes --quiet chromium) || $(BIN)/python -m playwright install chromium
	touch $@

browser: $(VENV)/.browser ## install what drives a browser, and Chromium where it is missing

test-browser: $(VENV)/.browser ## the lens in a real JupyterLab and Chromium; pictures in build/browser
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/browser -m browser

pictures: $(VENV)/.browser ## make the README's pictures of the lens from the real thing
	$(BIN)/python -m tests.browser.pictures docs

package: $(STAMP) ## build sdist and wheel, install each into an empty environment, run its demo
	rm -rf dist build/package
	mkdir -p build
	$(BIN)/python -m build --outdir dist . > build/package.log
	$(BIN)/python -m venv --without-pip build/package
	$(INTO_EMPTY) -c constraints.txt dist/*.tar.gz
	cd build && package/bin/cudalens demo > package.log
	$(INTO_EMPTY) --no-deps --force-reinstall dist/*.whl
	cd build && package/bin/cudalens demo > package.log

coverage: ## what the last `make unit CUDALENS_TESTS=thorough` did not reach, by line and branch
	$(BIN)/python -m coverage report --show-missing --skip-covered

$(VENV)/.mutate: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[mutate]"
	touch $@

mutate: $(VENV)/.mutate ## mutants of the guards, hints and host errors that no test notices: a random sample in MINUTES=25
	$(MAKE) --jobs=2 --output-sync mutate-guards mutate-diagnosis

mutate-%:
	rm -rf build/mutate/$* && mkdir -p build/mutate/$*
	tar --create --exclude='./.[a-z]*' --exclude=./build --exclude=./notebooks . | tar --extract --directory=build/mutate/$*
	cd build/mutate/$* && export PATH="$(abspath $(BIN)):$$PATH" PYTHONPATH=. && set -e; \
	cosmic-ray init tests/mutation/$*.toml session.sqlite; \
	python -m tests.mutants session.sqlite; \
	cosmic-ray baseline tests/mutation/$*.toml; \
	timeout $(MINUTES)m cosmic-ray exec tests/mutation/$*.toml session.sqlite || test $$? = 124; \
	cr-report --surviving-only --show-diff session.sqlite

soak: $(STAMP) ## a thousand generated cells in one shell, at most 25 minutes
	$(BIN)/python -m benchmarks.soak

# What is compared with changes nothing that the tests import: setup's pins stay.
$(VENV)/.bench: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[bench]"
	touch $@

libraries: $(STAMP) ## right programs of the libraries that people train with, every way: 15 minutes, 6 GB; NAMES="graph_networks" for some
	$(BIN)/python -m tests.libraries $(NAMES)

bench: $(VENV)/.bench ## measure the costs; writes benchmarks/results.json, docs/performance.md and the README's table
	$(BIN)/python -m benchmarks

test-cuda-host: $(STAMP) ## torch's CUDA build without a GPU, on the stand-in of tests/standin: 2.11.0 and 2.13.0, one of your own by TORCH=, or all, a gigabyte each
	$(BIN)/python -m tests.cuda_host $(TORCH)

# The python at hand, unless it has no torch or that of `make setup` finds a device.
SEES_CUDA = $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null
test-gpu: ## the tests that need a CUDA device
	$$($(SEES_CUDA) || ! $(PYTHON) -c 'import torch' 2>/dev/null && echo $(BIN)/python || echo $(PYTHON)) -m pytest tests/gpu -m gpu -p no:cacheprovider

WHEELS = build/hardware/wheels
FOR_GPU = --only-binary=:all: --python-version 3.12 --implementation cp $(addprefix --platform manylinux,_2_28_x86_64 _2_17_x86_64 2014_x86_64 1_x86_64)
hardware: $(STAMP) ## pack what a lent GPU machine lacks, and print the one command to run there
	rm -rf $(WHEELS) && mkdir -p $(WHEELS)
	grep -v '^#' tests/gpu/wheels.txt | PIP_CONSTRAINT=/dev/null xargs $(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps $(FOR_GPU) -d $(WHEELS)
	@mib=$$(( ($$(git ls-files -z | xargs -0 cat | wc -c) + $$(cat $(WHEELS)/* | wc -c)) / 1048576 )); \
	echo "the tracked files and the wheels: $$mib MiB"; test $$mib -lt 64 || { echo "64 MiB at most can be carried"; exit 2; }
	@echo "Carry $(WHEELS), and run there, in the repository's root, with OUT naming an empty folder:"
	@echo "bash tests/gpu/hardware.sh"
	@echo "Then judge here: CUDALENS_GPU_RESULTS=results.json $(BIN)/python -m pytest tests/gpu -m gpu"

clean: ## remove what the targets made
	rm -rf $(VENV) build dist demo .pytest_cache .mypy_cache .ruff_cache
