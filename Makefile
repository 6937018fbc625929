# Each target sets up what it needs in .venv; the second time that takes no time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
SEEDS ?= 1000
TESTS ?= tests
PROCESSES ?= 4
SECONDS ?= 600
SEED ?= 1
KILLS ?= 50
GPU_PYTHON ?= 3.12
# The tests start hundreds of Python processes: without stored byte code each would compile all of keepstep.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo demo-resume demo-one-copy test coverage lint reference site wheel bench findings simulate mutants faults habits upgrade month soak large gpu gpu-bundle clean
.DEFAULT_GOAL := help

help: ## what there is to do
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "keepstep needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) (a few minutes the first time: it installs PyTorch) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "$$(grep '^torch==' constraints.txt)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

setup: $(STAMP) ## everything into .venv

demo: $(STAMP) ## a real training job survives kills, with a live view
	@$(BIN)/keepstep demo $(DEMO)

demo-resume: $(STAMP) ## all groups and services killed at once; the job resumes with equal losses
	@$(BIN)/keepstep demo --resume

demo-one-copy: $(STAMP) ## one model sharded over four ranks, killed one after another; no step is lost
	@$(BIN)/keepstep demo --one-copy

test: $(STAMP) ## all tests, in four processes: make test TESTS=tests/unit PROCESSES=1
	@$(SECOND_CHANCE) $(BIN)/python -m pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder $(TESTS)

coverage: $(STAMP) ## lines that the tests run, subprocesses too: make coverage TESTS="tests/unit tests/services/cli"
	@rm -rf .coverage && mkdir .coverage
	-@$(BIN)/coverage run -m pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder $(TESTS)
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage report

lint: $(STAMP) ## style, types, imports between rooms, prose, style of the dashboard's JavaScript
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python docs/prose.py
	@DENO_NO_UPDATE_CHECK=1 $(BIN)/deno fmt --check --quiet
	@DENO_NO_UPDATE_CHECK=1 $(BIN)/deno lint --quiet

reference: $(STAMP) ## docs/reference.md and docs/python.md, made from the code
	@$(BIN)/python docs/reference.py

site: $(STAMP) ## the documentation as a site, in .site; fails for a broken link or a page that no page leads to
	@test $(VENV)/.site -nt pyproject.toml || \
	  { $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]' && touch $(VENV)/.site; }
	@$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --nitpicky --conf-dir docs . .site
	@echo "open .site/index.html"

wheel: $(STAMP) ## the sdist and the wheel, in dist/
	@$(BIN)/python -m hatchling build

simulate: $(STAMP) ## groups and one to three lighthouses against all faults in virtual time: make simulate SEEDS=100000
	@$(BIN)/python -m tests.simulation.run --seeds $(SEEDS) $(SIMULATE)

mutants: $(STAMP) ## planted bugs, each of which a stored test has to catch
	@$(BIN)/python -m tests.mutants.run

faults: $(STAMP) ## lighthouses, etcd, groups killed, frozen, cut off, again and again (half an hour): make faults FAULTS=--list
	@$(BIN)/python -m tests.faults $(FAULTS)

habits: $(STAMP) ## scripts of many habits as plain torch, under torch's DDP, and with keepstep and a kill: make habits HABITS=gan
	@$(BIN)/python -m tests.habits $(HABITS)

upgrade: $(STAMP) ## a mesh of another commit, restarted process by process from this tree, and back: make upgrade OLD=COMMIT
	@$(BIN)/python -m tests.faults.upgrade $(if $(OLD),--old-commit $(OLD)) $(UPGRADE)

month: $(STAMP) ## services in a month of virtual time with 100,000 jobs: what they keep is bounded: make month JOBS=10000
	@$(BIN)/python -m tests.faults.month $(if $(JOBS),--jobs $(JOBS)) $(MONTH)

soak: $(STAMP) ## a real job under faults of a seed, with `keepstep chaos`: make soak SECONDS=3600 SEED=1
	@$(BIN)/python -m tests.faults.soak --seconds $(SECONDS) --seed $(SEED) $(SOAK)

large: $(STAMP) ## a state of 20 GiB saved, loaded, healed, and compared: make large LARGE="--gib 4 --folder /mnt"
	@$(BIN)/python -m tests.faults.large $(LARGE)

kills: $(STAMP) ## a model that exists once under random SIGKILLs, beside an undisturbed run: make kills KILLS=50 SEED=1
	@$(BIN)/python -m tests.support.jobs.one_copy_kills --kills $(KILLS) --seed $(SEED)

gpu: $(STAMP) ## checks with NCCL on the GPUs of this machine: make gpu GPU="--only collectives"; GPU="--device cpu"
	@OPENBLAS_NUM_THREADS=1 $(BIN)/python -m tests.gpu $(GPU)

gpu-bundle: $(STAMP) ## the checks and packages for a GPU machine without a registry, in .gpu-bundle
	@$(BIN)/python -m tests.gpu.bundle --python $(GPU_PYTHON)

bench: $(STAMP) ## side by side with torchft, table and JSON
	@$(BIN)/python benchmarks/run.py $(BENCH)

findings: ## what other packages do against a good guess, without keepstep: make findings NAME=gloo_max_of_nan
	@PYTHON=$(PYTHON) findings/run $(NAME)

clean: ## removes .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .coverage .site dist
