# Everything a newcomer needs; each target sets up what it uses in .venv.
#   make quickstart   corpus, training on two CPU ranks, fold, export, sample (about 6 minutes on two cores)
#   make test         the test suite
#   make check        format, lint, types
#   make benchmark    speed as ratios (see benchmarks/README.md)
#   make serve-check  exports in vLLM, llama.cpp and transformers 5 (docs/serving.md; 5 GB of environments, 20 minutes)

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

.PHONY: quickstart test check format benchmark serve-check clean

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

serve-check: $(VENV)/.installed-test $(VENV)-vllm/.installed $(VENV)-llama/.installed
	PYTHONPATH=. $(BIN)/python -m tests.serving.run $(ARGUMENTS)

clean:
	rm -rf $(VENV) $(VENV)-paddleformers $(VENV)-vllm $(VENV)-llama data/quickstart runs/quickstart

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

# Clients of exported models. Of vLLM's three dependencies for images and sound, whose builds do not fit, it needs none.
$(VENV)-vllm/.installed: tests/serving/requirements-vllm.txt
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/pip install --quiet --progress-bar off -r tests/serving/requirements-vllm.txt
	$(VENV)-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# llama-cpp-python is compiled, which takes about 10 minutes on two cores. The converter has a folder of its own: both
# have a package llama_cpp.
$(VENV)-llama/.installed: tests/serving/requirements-llama.txt tests/serving/requirements-llama-converter.txt
	$(PYTHON) -m venv $(VENV)-llama
	$(VENV)-llama/bin/pip install --quiet --progress-bar off -r tests/serving/requirements-llama.txt
	$(VENV)-llama/bin/pip install --quiet --progress-bar off --no-deps --target $(VENV)-llama/converter \
	  -r tests/serving/requirements-llama-converter.txt
	touch $@
