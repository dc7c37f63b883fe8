# make train: a model on this machine, now.   make test: the tests.   Both install what they need into .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
MANIFEST := pyproject.toml setup.cfg constraints.txt

.PHONY: train test lint types wheel clean

train: $(VENV)/.installed
	$(BIN)/python -m hlat.train $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadgroup $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

wheel: $(VENV)/.installed-dev
	$(BIN)/python -m build --wheel --outdir dist .

clean:
	rm -rf $(VENV) build dist *.egg-info

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v <= (3, 13) else f"hlat needs Python 3.10 to 3.13, $(PYTHON) is {v[0]}.{v[1]}; run make PYTHON=python3.11")'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "$(PYTHON) has no venv module; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python $(MANIFEST)
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/bin/python $(MANIFEST)
	$(INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.installed
