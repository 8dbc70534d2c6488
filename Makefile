PYTHON ?= python3
BIN := .venv/bin
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)

# pyright would otherwise ask the network for its newest version before every run.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: venv demo docs test test-all lint format clean

INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
CHECK_TORCH = $(BIN)/python -c "from importlib.metadata import version; v = version('torch'); \
	raise SystemExit(None if v.split('+')[0] == '$(TORCH)' else f'torch {v} is installed in .venv, but constraints.txt \
	asks for torch $(TORCH): run \"make clean\" and then \"make venv\".')"

venv: .venv/.installed
	@$(CHECK_TORCH)

.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) -e '.[plot,export,track,sweep,transformers,lightning,docs,dev]'
	touch .venv/.demo $@

# The library and its figures alone, which install in a fraction of the time; make venv adds the rest to them.
.venv/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) -e '.[plot]'
	touch $@

demo: .venv/.demo
	@$(CHECK_TORCH)
	$(BIN)/pacprune demo

# The site, in build/site: every link and anchor is checked, and nothing is asked of the network.
docs: venv
	$(BIN)/python docs/build.py

# Files in their order: by number of tests, those with few long ones would come last, and one worker would wait.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# The same tests at full size: those that repeat something at random do so thousands of times.
test-all: lint
	PACPRUNE_TEST_ALL=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@$(BIN)/pyright --version > /dev/null || { echo 'pyright did not start, so the types were not checked: run "make clean" and then "make venv" to install it with its own node.'; exit 1; }
	$(BIN)/pyright
	$(BIN)/lint-imports

format: venv
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv .cache build .pytest_cache .ruff_cache .import_linter_cache src/pacprune.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
