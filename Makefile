# Every target sets up what it needs in .venv by itself. On a machine whose python3 already has a torch that sees an
# accelerator, that torch is used; elsewhere TORCH says which one to install.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/ready
PIP    := $(BIN)/python -m pip -qq --disable-pip-version-check

.PHONY: demo test test-fast test-hpu test-cuda lint types clean

demo: $(READY)
	$(BIN)/python examples/demo.py

# Each process begins with a share of neighbouring tests, and takes others' last ones when it is done.
WORKERS ?= 2
TESTS   := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# Seconds each: minutes in all.
test-fast: $(READY)
	$(TESTS) -m "not slow and not exhaustive" $(PYTEST)

# All but whole grids, many trials and long jobs.
test: $(READY)
	$(TESTS) -m "not exhaustive" $(PYTEST)

test-all: $(READY)
	$(TESTS) $(PYTEST)

# The Trainer's tests again, on a Gaudi in the host's memory (docs/simulated-hpu.md).
PROFILE ?= 1.21
ON_HPU  := tests/trainer/ tests/acceptance/

test-hpu: $(READY)
	$(TESTS) -p lightning_megatron.testing.hpu.plugin --hpu-sim $(PROFILE) -m "not exhaustive" $(ON_HPU) $(PYTEST)

# The Trainer's tests again, on CUDA and NCCL: all ranks share the machine's first card.
test-cuda: $(READY)
	$(BIN)/python -m pytest -p lightning_megatron.testing.one_card --one-card -m "not exhaustive" tests/cuda/ $(ON_HPU) $(PYTEST)

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(READY)
	$(BIN)/mypy $(wildcard lightning_megatron examples benchmarks)

clean:
	rm -rf $(VENV) .demo

HAS_ACCELERATOR := from runpy import run_path; \
	raise SystemExit(run_path("lightning_megatron/device.py")["best_available"]().type == "cpu")

$(READY): setup.cfg pyproject.toml
	@echo "installing into $(VENV)"
	@rm -rf $(VENV)
	@if $(PYTHON) -c '$(HAS_ACCELERATOR)' 2>/dev/null; then \
		$(PYTHON) -m venv --system-site-packages $(VENV); \
	else \
		$(PYTHON) -m venv $(VENV) && $(PIP) install '$(TORCH)'; \
	fi
	@$(PIP) install --editable '.[dev]'
	@touch $@
