# Every target sets up .venv by itself when pyproject.toml or constraints.txt has changed since the last time.
PYTHON := .venv/bin/python
SETUP := .venv/.setup
BOOTSTRAP ?= python3

# One torch thread per worker: two workers fill two cores. Worksteal, because single tests differ in length far more
# than files do: an idle worker takes over tests of the busy one, whatever file they are in.
PYTEST := OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -n 2 --dist worksteal

ifeq ($(BOUGH_REAL_WEIGHTS),1)
MARKS := not long
else
MARKS := not long and not real_weights
endif

.PHONY: run test test-long check format bench setup

run: $(SETUP)  ## make run ARGS='MODEL "a prompt"'; without ARGS, a demo
	@$(PYTHON) -m bough run $(ARGS) $(if $(ARGS),,</dev/null)

test: $(SETUP)
	$(PYTEST) -m "$(MARKS)"

test-long: $(SETUP)
	$(PYTEST) -m long

check: $(SETUP)
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	$(PYTHON) -m mypy
	.venv/bin/lint-imports --no-logo

format: $(SETUP)
	$(PYTHON) -m ruff check --fix
	$(PYTHON) -m ruff format

bench: $(SETUP)
	$(PYTHON) bench/cpu.py $(ARGS)

setup: $(SETUP)

$(SETUP): pyproject.toml constraints.txt
	@$(BOOTSTRAP) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Bough needs Python 3.11 or newer, and $(BOOTSTRAP) is " + sys.version.split()[0] + "; name another: make BOOTSTRAP=python3.11")'
	@echo "setting up .venv (a minute or two, once)"
	@$(BOOTSTRAP) -m venv .venv
	@$(PYTHON) -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[cli,server,gguf,grammar,hub,dev]'
	@touch $@
