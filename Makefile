# Every target sets up what it needs in .venv by itself. On a machine whose python3 already has a torch that sees an
# accelerator, that torch is used; elsewhere TORCH says which one to install.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
SIMULATION := tests/simulated-gaudi
READY  := $(VENV)/ready
# Versions of the tools that judge and of what numbers are compared with; none for the newest.
VERSIONS ?= .ci/versions.txt
# pip shows its progress on a terminal only; elsewhere each step is one line.
PIP_QUIET := $(if $(MAKE_TERMOUT),,-qq)
PIP    := $(BIN)/python -m pip $(PIP_QUIET) --disable-pip-version-check --retries 10 --timeout 60

# Processes that tests start, by the hundred, would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

# Tests run as if this machine had another processor: old, bf16 or arm (tests/processors).
ifdef FAKE_PROCESSOR
export FAKE_PROCESSOR
export PYTHONPATH := $(CURDIR)/tests/processors$(if $(PYTHONPATH),:$(PYTHONPATH))
endif

.PHONY: demo first-hour test test-all test-hpu test-cuda test-eval test-streaming test-habana lightning-suite bench docs dist lint types clean

demo: $(READY)
	$(BIN)/python examples/demo.py

# Each process begins with a share of neighbouring tests, and takes others' last ones when it is done. Three keep two
# cores busy, as many tests wait for processes that start, or hang on purpose.
WORKERS ?= 3
SHARED  := -n $(WORKERS) --dist worksteal
TESTS   := $(BIN)/python -m pytest $(SHARED)

# The gate: what every change must pass, the same tests for each, on the CPU and then on a Gaudi in the host's memory
# (docs/simulated-hpu.md), where those that are slow stay out. They wait for events, not for times. A torch that was
# built for CUDA can simulate no Gaudi.
GATE      := $(BIN)/python tests/second_look.py $(SHARED) --timeout 300 --dearest 10
PROFILE   ?= 1.24
PRODUCT   ?= GAUDI2
GAUDI     := -p simulated_gaudi.plugin --hpu-sim $(PROFILE) --hpu-sim-device $(PRODUCT)
ON_GAUDI  := tests/device/ tests/acceptance/ $(addprefix tests/trainer/,parity/ resume/ training/)
SIMULATES := import torch; raise SystemExit(torch.version.cuda is not None)

test: $(READY)
	@status=0; set -x; \
	$(GATE) -m "gate or not (slow or exhaustive)" $(PYTEST) || status=1; \
	if $(BIN)/python -c '$(SIMULATES)'; then \
		$(GATE) $(GAUDI) -m "not (slow or exhaustive)" $(ON_GAUDI) $(PYTEST) || status=1; \
	fi; \
	exit $$status

# These and the rest: long ones, whole grids, random moments, many trials. PART=2/4 runs the second of four parts.
test-all: $(READY)
	$(TESTS) --hypothesis-profile random $(if $(PART),--part $(PART)) $(PYTEST)

# The Trainer's tests again, on a Gaudi in the host's memory, slow ones too.
ON_HPU := tests/trainer/ tests/acceptance/

test-hpu: $(READY)
	$(TESTS) $(GAUDI) -m "not exhaustive" $(ON_HPU) $(PYTEST)

# The Trainer's tests again, on CUDA and NCCL: all ranks share the machine's first card.
test-cuda: $(READY)
	$(BIN)/python -m pytest -p lightning_megatron.testing.one_card --one-card -m "not exhaustive" tests/cuda/ $(ON_HPU) $(PYTEST)

# The first hour on a machine with CUDA cards: a report to send back (docs/first-hour-cuda.md). STEPS="--only kill stop".
first-hour: $(READY)
	$(BIN)/python benchmarks/first_hour.py $(STEPS)

# Tasks of lm-eval, an extra of half a gigabyte.
test-eval: $(VENV)/eval
	$(BIN)/python -m pytest tests/trainer/evaluation/test_lm_eval.py $(PYTEST)

$(VENV)/eval: $(READY)
	@echo "$(VENV): installing lm-eval and what it needs"
	@$(PIP) install --editable '.[dev,eval]'
	@touch $@

# Loaders of litdata and mosaicml-streaming, in an environment of their own: they want other versions than the rest, and
# a torch for CUDA (7 GB), since torchvision is on PyPI for that alone.
STREAMING := $(VENV)-streaming

test-streaming: $(STREAMING)/ready
	$(STREAMING)/bin/python -m pytest tests/trainer/data/test_streaming_loaders.py $(PYTEST)

$(STREAMING)/ready: setup.cfg pyproject.toml
	@echo "$(STREAMING): installing litdata, mosaicml-streaming and a torch for CUDA (7 GB)"
	@rm -rf $(STREAMING)
	@$(PYTHON) -m venv $(STREAMING)
	@$(STREAMING)/bin/python -m pip $(PIP_QUIET) --disable-pip-version-check install --editable '.[dev,litdata,mosaic]'
	@touch $@

# lightning-habana's accelerator, on the last Lightning that it imports on; a skipped test is a failure here.
HABANA := $(VENV)-habana

test-habana: $(HABANA)/ready
	$(HABANA)/bin/python -m pytest $(GAUDI) -rs tests/device/test_lightning_habana.py $(PYTEST) | tee $(HABANA)/log
	@grep -q "1 passed" $(HABANA)/log

$(HABANA)/ready: setup.cfg pyproject.toml $(SIMULATION)/pyproject.toml
	@echo "$(HABANA): installing lightning-habana and Lightning 2.5.5"
	@rm -rf $(HABANA)
	@$(PYTHON) -m venv $(HABANA)
	@$(HABANA)/bin/python -m pip $(PIP_QUIET) --disable-pip-version-check install $(TORCH)
	@$(HABANA)/bin/python -m pip $(PIP_QUIET) --disable-pip-version-check install $(OURS) lightning==2.5.5 lightning-habana==1.6.0
	@touch $@

# Lightning's own tests, as they are and with our strategy, from a checkout of its repository (docs/lightning-suite.md).
# By hand: SUITE="--one-file", or some of its folders.
lightning-suite: $(READY)
	$(BIN)/python tests/lightning_suite/swapped_suite.py "$(LIGHTNING)" $(SUITE)

# Ours beside its peers, each in an environment of its own under .bench; BENCH="--rows all" for every row.
bench: $(READY)
	$(BIN)/python benchmarks/bench.py $(BENCH)

# The site of docs/, in build/site; every warning is an error. It has programs of its own, beside those of the tests.
docs: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

$(VENV)/docs: $(READY)
	@echo "$(VENV): installing the programs that make the site"
	@$(PIP) install --editable '.[docs]'
	@touch $@

# Wheel and source archive in dist, as they would be published.
dist: $(READY)
	@rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(READY)
	$(BIN)/mypy $(wildcard lightning_megatron examples benchmarks $(SIMULATION))

clean:
	rm -rf $(VENV) $(STREAMING) $(HABANA) .demo

HAS_ACCELERATOR := from runpy import run_path; \
	raise SystemExit(run_path("lightning_megatron/device/kinds.py")["best_available"]().type == "cpu")

# By content: a checkout changes times. An environment that an interrupted run has left, or one of other requirements, is
# completed.
NEEDED := setup.cfg pyproject.toml $(SIMULATION)/pyproject.toml $(VERSIONS)
SUM    := $(shell cat $(NEEDED) | cksum)
ITS_PYTHON := import sys; print(sys.version)
OURS := --editable '.[dev]' --editable $(SIMULATION)

$(READY): $(NEEDED)
	@if [ "$$(cat $@ 2>/dev/null)" != "$(SUM)" ]; then \
		rm -f $@; echo "$(VENV), step 1 of 3: creating the environment with $$($(PYTHON) -V)"; \
		old=$$($(BIN)/python -c '$(ITS_PYTHON)' 2>/dev/null); new=$$($(PYTHON) -c '$(ITS_PYTHON)'); \
		[ "$$old" = "$$new" ] && clear= || clear=--clear; \
		if $(PYTHON) -c '$(HAS_ACCELERATOR)' 2>/dev/null; then \
			$(PYTHON) -m venv $$clear --system-site-packages $(VENV) && \
			echo "$(VENV), step 2 of 3: using the torch of this machine, which sees an accelerator"; \
		else \
			$(PYTHON) -m venv $$clear $(VENV) && \
			echo "$(VENV), step 2 of 3: installing $(TORCH), the largest download" && $(PIP) install '$(TORCH)'; \
		fi && echo "$(VENV), step 3 of 3: installing the package and about 140 others, for itself, its tests and checks" && \
		{ $(PIP) install $(if $(VERSIONS),--constraint $(VERSIONS)) $(OURS) || \
			{ echo "not as in $(VERSIONS): with other versions"; $(PIP) install $(OURS); }; } && \
		echo "$(VENV): complete"; \
	fi && echo "$(SUM)" > $@
