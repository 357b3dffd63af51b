# Every target sets up what it needs: a virtual environment, the pinned packages, the module built from cc/.
#   make demo ARGS="--steps 20"   the main example        make test        every check, on the CPU
#   make test-full                whole test matrices     make sanitize    soak tests under ASan and UBSan
#   make soak                     long random draws       make wheel       a stable-ABI wheel, in dist/
#   make test-releases            the frontends with other releases of the frameworks (RELEASES), from the wheel
#   make test-hosts               every host and every model of theirs, in an environment of its own
#   make test-aarch64             the native tests on aarch64, under an emulator
#   make docs                     API pages, build/docs   make benchmark   BENCH selects a file
#   make stub                     renews .pyi and schema  make format      lays out Python and C++
#   make sass                     renews the instruction counts of the Hopper kernels
#   PY=python3.12 chooses the interpreter; GROUPED_CUDA=auto|on|off whether CUDA sources are built, and
#   GROUPED_CUDA_ARCHS for which chips: found, all, or a list of 80, 89, 90, 90a (cmake/archs.cmake).
comma := ,
SHELL := bash
.DEFAULT_GOAL := test
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

PY ?= python3
WHEEL_PY ?= python3.12
VENV ?= .venv
CXX ?= c++
GROUPED_CUDA ?= auto
GROUPED_CUDA_ARCHS ?= found
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
WORKERS ?= 2
RELEASES ?= torch==2.11.0 jax==0.11.2
BENCH ?= benchmarks/bench_grouped_matmul.py benchmarks/bench_overhead.py
ARGS ?=

HEADERS := import pathlib, sysconfig; pathlib.Path(sysconfig.get_path("include"), "Python.h").stat()
PROGRAM := int main() { if constexpr (true) return 0; }
PYTHON := $(abspath $(VENV))/bin/python
BIN := $(abspath $(VENV))/bin
PACKAGES := grouped_core jax_grouped torch_bridge
NATIVE_SOURCES := CMakeLists.txt $(wildcard cmake/*) $(wildcard cc/*/* cc/*/*/*)
CXX_FILES := $(foreach ext,h cc cuh cu,$(wildcard cc/*/*.$(ext) cc/*/*/*.$(ext))) $(wildcard tests/native/*.cc)

# $(call need,command,what is missing and what to do): stops with that one line where the command fails.
need = $(if $(filter 0,$(shell { $(1); } >/dev/null 2>&1; echo $$?)),,$(error $(2)))

.PHONY: demo test test-full test-releases test-hosts test-aarch64 sanitize soak wheel docs benchmark stub sass lint format types native clean FORCE

$(VENV)/bin/python:
	$(call need,$(PY) -c 'import sys; sys.exit(sys.version_info < (3$(comma) 11))',Python 3.11 or later is needed as $(PY); install it or name one: make PY=python3.12)
	$(call need,$(PY) -c 'import ensurepip$(comma) venv',$(PY) cannot make virtual environments; install its venv package (python3-venv))
	$(call need,$(PY) -c '$(HEADERS)',the headers of $(PY) are missing; install its development package (python3-dev))
	$(call need,echo '$(PROGRAM)' | $(CXX) -std=c++17 -fsyntax-only -x c++ -,there is no C++17 compiler as $(CXX); install g++ or clang++$(comma) or name one: make CXX=clang++)
	@$(PY) -m venv $(VENV)

# The demo does without PyTorch and the checkers.
$(VENV)/.demo-packages: requirements/demo.txt | $(VENV)/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/demo.txt
	@touch $@

$(VENV)/.packages: requirements/dev.txt $(VENV)/.demo-packages
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	@touch $@

# A development build: the module beside the sources, and a .pth file that leads to them, so that new files are seen.
build/.configured: CMakeLists.txt $(wildcard cmake/*) build/.options $(VENV)/.demo-packages
	PATH="$(BIN):$$PATH" cmake -S . -B build -G Ninja -DPython_EXECUTABLE=$(PYTHON) \
	  -DGROUPED_OUTPUT_DIR=grouped_core -DGROUPED_WERROR=ON -DGROUPED_CUDA=$(GROUPED_CUDA) \
	  '-DGROUPED_CUDA_ARCHS=$(GROUPED_CUDA_ARCHS)'
	@pwd > "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/jax_grouped_development.pth"
	@touch $@

# Changes only where an option does.
build/.options: FORCE
	@mkdir -p build
	@echo '$(GROUPED_CUDA) $(GROUPED_CUDA_ARCHS)' | cmp -s - $@ || echo '$(GROUPED_CUDA) $(GROUPED_CUDA_ARCHS)' > $@

build/.native: build/.configured $(NATIVE_SOURCES)
	PATH="$(BIN):$$PATH" cmake --build build --parallel $(JOBS)
	@touch $@

native: build/.native

# The demo builds for what it runs on: CUDA sources take minutes, and nothing runs them where JAX finds no GPU. What the
# user says of GROUPED_CUDA counts more; other targets then build again as they are told.
ifeq ($(filter demo,$(MAKECMDGOALS))$(origin GROUPED_CUDA),demofile)
GPU := $(or $(wildcard /dev/nvidia[0-9]*),$(shell nvidia-smi -L 2>/dev/null))
PLUGIN := $(shell $(PYTHON) -c 'import importlib.util; print(importlib.util.find_spec("jax_plugins") or "")' 2>/dev/null)
NO_CUDA := $(if $(GPU),$(if $(PLUGIN),,JAX in $(VENV) has no plugin for the GPU),no GPU found)
ifneq ($(NO_CUDA),)
$(info demo: $(NO_CUDA), so the kernels for the CPU are built alone (GROUPED_CUDA=on builds all))
demo: GROUPED_CUDA := off
endif
endif

demo: native
	$(PYTHON) examples/train_lm.py $(ARGS)

lint: $(VENV)/.packages
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

format: $(VENV)/.packages
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

types: native $(VENV)/.packages
	$(BIN)/pyrefly check

test: lint types
	$(PYTHON) -m pytest -n $(WORKERS) $(ARGS)

test-full: lint types
	$(PYTHON) -m pytest -n $(WORKERS) --full $(ARGS)

soak: native $(VENV)/.packages
	$(PYTHON) -m pytest tests/soak --soak $(ARGS)

# A tree of its own: the sanitised module beside copies of the packages and the tests. Python itself is not instrumented,
# so the runtime is preloaded and its leaks are not ours to report. -S: no .pth file may lead back to the plain build.
SANITIZED := build/sanitize/tree
SANITIZED_TESTS ?= $(wildcard tests/soak/test_native_*.py)
sanitize: $(VENV)/.packages
	PATH="$(BIN):$$PATH" cmake -S . -B build/sanitize -G Ninja -DGROUPED_SANITIZE=ON -DGROUPED_WERROR=ON \
	  -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-O1 -g" -DGROUPED_CUDA=off \
	  -DPython_EXECUTABLE=$(PYTHON) -DGROUPED_OUTPUT_DIR=$(SANITIZED)/grouped_core
	PATH="$(BIN):$$PATH" cmake --build build/sanitize --parallel $(JOBS)
	@tar -c --exclude='*.so' --exclude=__pycache__ pyproject.toml tests $(PACKAGES) | tar -x -C $(SANITIZED)
	cd $(SANITIZED) && LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
	  PYTHONPATH="$$PWD:$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
	  $(PYTHON) -S -m pytest -p no:cacheprovider $(SANITIZED_TESTS) $(ARGS)

# Native tests on aarch64 under an emulator, in a tree of its own. Tests that need JAX or PyTorch, or start a program,
# are left out by name.
AARCH64 := build/aarch64
AARCH64_CPU ?= max
AARCH64_TESTS ?= $(addprefix tests/,soak/test_native_sweep.py $(patsubst %,native/test_%.py,grouped_matmul activation \
  quantize quantized_products quantized_results low_rank routing sums shards shapes golden bind))
test-aarch64: $(VENV)/.packages
	$(call need,aarch64-linux-gnu-g++ --version,there is no compiler for aarch64; install g++-aarch64-linux-gnu)
	$(call need,qemu-aarch64-static --version,there is no emulator of aarch64; install qemu-user-static)
	PATH="$(BIN):$$PATH" cmake --toolchain cmake/aarch64-linux-gnu.cmake -S . -B $(AARCH64) -G Ninja \
	  -DGROUPED_WERROR=ON -DGROUPED_CUDA=off -DPython_EXECUTABLE=$(PYTHON) \
	  -DGROUPED_OUTPUT_DIR=$(AARCH64)/tree/grouped_core -DSKBUILD_SOABI="$$($(PYTHON) -c 'import sys; \
	    print(f"cpython-{sys.version_info.major}{sys.version_info.minor}-aarch64-linux-gnu")')"
	PATH="$(BIN):$$PATH" cmake --build $(AARCH64) --parallel $(JOBS)
	test -d $(AARCH64)/root || tests/native/aarch64_root.sh $(AARCH64)/root $(PYTHON)
	@tar -c --exclude='*.so' --exclude=__pycache__ pyproject.toml tests cc $(PACKAGES) | tar -x -C $(AARCH64)/tree
	cd $(AARCH64)/tree && root="$$(cd ../root && pwd)" && \
	  PYTHONPATH="$$PWD:$$root/site:$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
	  QEMU_LD_PREFIX="$$root" qemu-aarch64-static -cpu $(AARCH64_CPU) "$$root"/usr/bin/python3.[0-9]* -S \
	  -m pytest -p no:cacheprovider -p no:hypothesispytest -p no:xdist $(AARCH64_TESTS) \
	  -k "not (jax or xla or torch or runtime or stub or threads or forked)" $(ARGS)

WHEEL_CUDA_ARCHS ?= $(if $(filter found,$(GROUPED_CUDA_ARCHS)),all,$(GROUPED_CUDA_ARCHS))
wheel:
	$(call need,$(WHEEL_PY) -c '$(HEADERS)',$(WHEEL_PY) with its headers is needed for the stable-ABI wheel; install it or name one: make wheel WHEEL_PY=python3.13)
	$(WHEEL_PY) -m venv build/wheel-venv
	@rm -rf dist
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) build/wheel-venv/bin/pip wheel --quiet --no-deps --wheel-dir dist . \
	  -C cmake.define.GROUPED_CUDA=$(GROUPED_CUDA) -C 'cmake.define.GROUPED_CUDA_ARCHS=$(WHEEL_CUDA_ARCHS)'
	@ls dist/*.whl

# A tree without the packages, so that the wheel's are found. It tells whether one binary, and what Dynamo traces of the
# packages, serve a release that the other tests do not install.
RELEASE_TREE := build/releases/tree
test-releases: wheel
	$(WHEEL_PY) -m venv --clear build/releases
	build/releases/bin/pip install --quiet --disable-pip-version-check $(RELEASES) flax optax orbax-checkpoint jaxtyping \
	  ml_dtypes matplotlib tqdm pytest pytest-xdist hypothesis
	build/releases/bin/pip install --quiet --disable-pip-version-check --no-deps dist/*.whl
	@mkdir $(RELEASE_TREE)
	@tar -c --exclude=__pycache__ pyproject.toml README.md docs examples tests | tar -x -C $(RELEASE_TREE)
	cd $(RELEASE_TREE) && ../bin/python -m pytest -n $(WORKERS) tests/jax_frontend tests/torch_frontend tests/parity $(ARGS)

# An environment of its own, because hosts pin what they need; its interpreter is that of the native module. Packages of
# the last two files are installed without what they depend on, which is another PyTorch and much that no test imports.
HOSTS := build/hosts
HOSTS_REQUIREMENTS := $(addprefix requirements/,hosts.txt hosts-training.txt hosts-jax.txt)
HOSTS_PIP := $(HOSTS)/bin/pip install --quiet --disable-pip-version-check
HOSTS_JAX := $(HOSTS)/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 12))'
$(HOSTS)/.packages: $(HOSTS_REQUIREMENTS) requirements/dev.txt requirements/demo.txt | $(VENV)/bin/python
	$(PYTHON) -m venv --clear $(HOSTS)
	$(HOSTS_PIP) -r requirements/hosts.txt
	@# PyTorch for CUDA brings the triton that it was built with; PyTorch for the CPU brings none.
	@if $(HOSTS)/bin/pip show --quiet triton 2>/dev/null; then sed '/^triton==/d' requirements/hosts-training.txt; \
	  else cat requirements/hosts-training.txt; fi > $(HOSTS)/training.txt
	$(HOSTS_PIP) --no-deps -r $(HOSTS)/training.txt
	@if $(HOSTS_JAX); then set -x; $(HOSTS_PIP) --no-deps -r requirements/hosts-jax.txt; fi
	@touch $@

test-hosts: native $(HOSTS)/.packages
	@$(HOSTS_JAX) || echo "test-hosts: Haliax and Levanter are left out, because these releases need Python 3.12 or \
	later and this is $$($(HOSTS)/bin/python --version); in a clean clone, make test-hosts PY=python3.12 runs them too"
	$(HOSTS)/bin/python -m pytest -n $(WORKERS) --full tests/hosts $(ARGS)

stub: native $(VENV)/.packages
	$(PYTHON) -m nanobind.stubgen -q --exclude-values -m grouped_core._native -o grouped_core/_native.pyi
	$(PYTHON) -m tests.native.schema_file

sass: native
	$(PYTHON) -m tests.native.sass > build/sass.txt && mv build/sass.txt tests/native/sass_sm90.txt

docs: native requirements/docs.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/docs.txt
	@# pdoc imports every module, and this one imports torchtitan, which make test-hosts alone installs
	$(BIN)/pdoc --docformat google -o build/docs $(PACKAGES) '!torch_bridge.integrations.torchtitan_override'

benchmark: native $(VENV)/.packages
	@for bench in $(BENCH); do $(PYTHON) $$bench $(ARGS) || exit 1; done

clean:
	rm -rf build dist grouped_core/*.so
