# Every target sets up what it needs in .venv: a fresh machine needs Python 3.11 and make.
#   make demo | test | lint | tutorials | bench | clean
#   make test TORCH=torch==2.14.1    the same against another torch

TORCH  ?= torch==2.13.0
PYTHON ?= $(shell for name in python3.11 python3; do $$name -c '' 2>/dev/null && echo $$name && break; done)

BIN      := .venv/bin
TORCHRUN := $(BIN)/torchrun --standalone --nproc-per-node

# Ranks share this machine's cores: one thread each, or they wait for one another.
export OMP_NUM_THREADS := 1

.PHONY: demo test lint tutorials bench clean

demo: .venv/torch
	$(TORCHRUN) 2 tutorials/train_gpt.py
	$(TORCHRUN) 4 tutorials/train_gpt.py --compare

test: .venv/torch
	$(BIN)/python -m pytest

lint: .venv/torch
	$(BIN)/ruff check .
	$(BIN)/mypy --strict

tutorials: .venv/torch
	set -e; for script in $(sort $(wildcard tutorials/[0-9]*.py)); do \
	    echo "== $$script"; $(BIN)/python $$script; done
	$(TORCHRUN) 2 tutorials/train_gpt.py --steps 20 --out runs/short
	set -e; for optimizer in muon adamw8bit shampoo; do $(TORCHRUN) 2 tutorials/train_gpt.py \
	    --optimizer $$optimizer --steps 8 --dim 64 --layers 1 --out runs/short; done
	$(TORCHRUN) 4 tutorials/train_gpt.py --compare --compare-steps 2 --out runs/short

bench: .venv/torch
	$(BIN)/python -m tests.bench

clean:
	rm -rf .venv build dist runs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# .venv/torch holds the requirement that .venv was made for; another TORCH makes it out of date.
# torch comes first and by itself: the extras then take the build that is there.
ifneq ($(shell cat .venv/torch 2>/dev/null),$(TORCH))
.PHONY: .venv/torch
endif
.venv/torch: pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python found. Install Python 3.11 or name one: make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "$(PYTHON) is older than Python 3.11. Name a newer one: make PYTHON=..."; exit 1; }
	@echo "Setting up .venv with $(TORCH) (a minute or two)"
	rm -f $@
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[test,dev,plot]"
	echo "$(TORCH)" > $@
