# Everything a newcomer needs; each target sets up what it uses in .venv.
#   make quickstart   corpus, training on two CPU ranks, fold, export, sample (about 6 minutes on two cores)
#   make test         the test suite
#   make check        format, lint, types
#   make benchmark    speed as ratios (see benchmarks/README.md)

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

.PHONY: quickstart test check format benchmark clean

quickstart: $(VENV)/.installed
	$(BIN)/python tools/quickstart.py

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest tests

check: $(VENV)/.installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.installed-test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

benchmark: $(VENV)/.installed-test $(VENV)-paddleformers/.installed
	PYTHONPATH=. $(BIN)/python benchmarks/run.py

clean:
	rm -rf $(VENV) $(VENV)-paddleformers data/quickstart runs/quickstart

$(VENV)/.installed: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --progress-bar off -r requirements.txt
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed requirements-test.txt
	$(BIN)/pip install --quiet --progress-bar off -r requirements-test.txt
	touch $@

# A peer of the benchmarks whose requirements exclude ours.
$(VENV)-paddleformers/.installed: benchmarks/requirements-paddleformers.txt
	$(PYTHON) -m venv $(VENV)-paddleformers
	$(VENV)-paddleformers/bin/pip install --quiet --progress-bar off -r benchmarks/requirements-paddleformers.txt
	touch $@
