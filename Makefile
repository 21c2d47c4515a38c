# Everything runs on .venv, which is built from the tested versions in requirements.lock.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test matrix kill check experiments-smoke setup clean

setup: .venv/.complete

.venv/.complete: requirements.lock pyproject.toml
	$(PYTHON) -c "import sys; assert sys.version_info >= (3, 11), 'Python 3.11 or newer is needed, this is ' + sys.version"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip setuptools wheel
	$(BIN)/python -m pip install --quiet $$(grep '^torch==' requirements.lock)
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-build-isolation -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	touch $@

demo: setup ## the main job: LoRA on the shipped tiny model
	$(BIN)/python -m glmexp

test: setup ## the tests
	$(BIN)/python -m pytest -n 2 --dist worksteal

matrix: setup ## every method x model x ZeRO stage on two ranks
	$(BIN)/python -m pytest -n 2 --dist worksteal -m matrix

kill: setup ## forty kill -9, each taken up again (an hour)
	$(BIN)/python -m pytest -m kill -s tests/entry/test_resume.py tests/engine/test_checkpoint.py

experiments-smoke: setup ## every study of experiments/, two steps a trial, on a CPU (a quarter of an hour)
	$(BIN)/python experiments/studies.py smoke

check: setup ## style, types, import rule
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache
