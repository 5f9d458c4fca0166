# Two commands for a newcomer, each complete by itself: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SITE := build/site-venv

.PHONY: demo demo-short test test-all faults lint audit wheel site clients install kernels clean

MINUTES ?= 15

demo: install  ## train a drafter for SmolLM2-135M-Instruct and measure it, within MINUTES=15
	$(BIN)/python scripts/demo.py --minutes $(MINUTES)

SHORT ?= demo-short

demo-short: install  ## the same road for CI: fewer answers, steps and prompts
	$(BIN)/outrider run recipes/demo.yaml name=$(SHORT) prepare.folder=runs/$(SHORT)/answers prepare.count=96 prepare.held_out.count=6 \
		prepare.max_new_tokens=64 train.steps=40 evaluate.prompts=4 evaluate.max_new_tokens=64 \
		'evaluate.baselines=[ngram, small_model]'

PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

test: install kernels  ## the cheapest tests that catch every known fault: five minutes on two cores
	$(PYTEST) -m "not slow"

test-all: install kernels  ## all tests: ten minutes on two cores; SEED=N repeats a run's random samples
	$(PYTEST) $(if $(SEED),--seed $(SEED))

RECORDING := build/recording

faults: install kernels  ## plant every known fault, and see that make test notices each: at most 90 minutes
	rm -rf $(RECORDING)
	$(BIN)/python scripts/recording.py $(RECORDING) -n auto --maxprocesses 4 --dist worksteal -m "not slow"
	$(BIN)/python scripts/faults.py $(RECORDING) --json build/faults.json

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/shape.py --check  # a package grows on purpose, or not at all
	$(BIN)/python scripts/claims.py  # a speed-up stands beside tokens/s, and every figure of speed in a result

audit: install  ## known weaknesses of the packages that are installed; needs a network, so CI does not run it
	@if $(BIN)/python -c "import pip_audit" 2> /dev/null; then $(BIN)/python -m pip_audit; \
	else echo "pip-audit is not installed, and it needs a network: $(BIN)/pip install pip-audit, then make audit"; fi

wheel: install  ## build the wheel, and run the first example of README from it, on every Python there is, without a compiler
	$(BIN)/python scripts/wheel.py

site: $(SITE)/.installed  ## the docs as pages with a search, in build/site; a broken link stops it
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict --quiet

$(SITE)/.installed: pyproject.toml
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet --disable-pip-version-check $$($(PYTHON) -c \
		"import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])")
	touch $@

CLIENTS := build/clients-venv

clients: $(CLIENTS)/.installed  ## the client libraries that tests/serve/test_clients.py drives, in an environment of their own

$(CLIENTS)/.installed: pyproject.toml
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check $$($(PYTHON) -c \
		"import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['clients'])")
	touch $@

install: $(VENV)/.installed

# torch comes first and alone: asked for with an upper bound, pip finds a CPU build where the index has one
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "torch>=2.9,<2.14"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev,grammar]"
	touch $@

kernels: $(VENV)/.kernels

$(VENV)/.kernels: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[kernels]"
	touch $@

clean:
	rm -rf $(VENV) runs build
