# The two commands: `make demo` and `make test`. `make help` lists the rest.
#
# PYTHON    interpreter to build the virtual environment with (>= 3.11; found by itself)
# PIP_ARGS  further arguments for pip, e.g. an index that carries CPU builds of torch
# PYTEST_ARGS  for `make observability`, e.g. --load-s 300

VENV := .venv
BIN := $(VENV)/bin
PACKAGES := neoflex svc_common planner_svc gpu_svc cpu_attn_svc gateway_svc
SOURCES := $(PACKAGES) tests benchmarks tools
BUILD_INPUTS := pyproject.toml CMakeLists.txt constraints.txt \
	$(shell find proto svc_common cpu_attn_svc \( -name '*.proto' -o -name '*.cpp' -o -name '*.h' -o -name CMakeLists.txt \) 2>/dev/null)

.PHONY: help demo test lint types imports protos format model unit integration clients console compose observability dashboards bench-serve bench-kernel sanitize cross bench-quantisation bench-hop bench-overlap bench-executor bench-sampling bench-planner bench-planner-full bench-baselines bench-estimate bench-realtime bench-gateway bench-policies bench-policy-check bench-offloading bench-telemetry gpu-check clean
.DEFAULT_GOAL := help
.NOTPARALLEL:

help: ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(VENV)/.runtime ## Serve the default model and answer one prompt
	@$(BIN)/neoflex demo

test: lint types imports protos unit integration ## Everything that is checked

lint: $(VENV)/.dev ## Style
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

types: $(VENV)/.dev ## Static types
	$(BIN)/mypy
	MYPYPATH=benchmarks $(BIN)/mypy benchmarks/*.py benchmarks/gpu_check/*.py
	MYPYPATH=tools/dashboards $(BIN)/mypy tools/dashboards/*.py

imports: $(VENV)/.dev ## Who may import whom
	$(BIN)/lint-imports

protos: $(VENV)/.dev ## Contracts
	$(BIN)/buf lint

model: $(VENV)/.runtime # The default model, in the user's cache directory
	@$(BIN)/neoflex model fetch

unit: $(VENV)/.dev model ## Tests of one module each
	$(BIN)/pytest tests --numprocesses 2 --dist loadfile $(foreach part,integration clients console compose/test_stack.py observability,--ignore tests/$(part))

integration: $(VENV)/.dev model ## Tests with the real services and the real model
	$(BIN)/pytest tests/integration -rP

clients: $(VENV)/.dev model ## Clients in Node, Go and C++ (examples/README.md says what they need)
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/pytest tests/clients

console: $(VENV)/.dev model ## The console page in headless Chromium (Debian's chromium); pictures go to build/console
	$(BIN)/pytest tests/console

compose: $(VENV)/.dev model ## The stack of compose/ in a Docker daemon; root on Debian gets one
	@bash tools/with_docker.sh $(BIN)/pytest tests/compose/test_stack.py -rP

observability: $(VENV)/.dev model ## Dashboards and alerts on a real Prometheus (Debian's); pictures go to build/observability
	@prometheus=$$(sh tools/prometheus.sh) && PATH="$$prometheus:$$PATH" $(BIN)/pytest tests/observability $(PYTEST_ARGS)

dashboards: $(VENV)/.dev # The dashboards' JSON, out of tools/dashboards
	$(BIN)/python tools/dashboards/write.py

sanitize: $(VENV)/.dev ## C++ tests under the address, undefined-behaviour and thread sanitizers
	@sh tools/sanitize.sh $(abspath $(BIN))

cross: $(VENV)/.dev ## C++ tests compiled for AArch64, with the NEON kernels, in an emulator
	@sh tools/cross.sh $(abspath $(BIN))

format: $(VENV)/.dev ## Rewrite the source in the project's style
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

bench-executor: $(VENV)/.dev ## What Python and launches cost per layer
	$(BIN)/python benchmarks/executor.py

bench-sampling: $(VENV)/.dev model ## What sampling and structured output cost of an iteration
	$(BIN)/python benchmarks/sampling.py

bench-serve: $(VENV)/.dev model ## Throughput and latency, beside transformers
	$(BIN)/python benchmarks/serve.py

bench-kernel: $(VENV)/.dev ## CPU attention against its floor and against torch
	$(BIN)/python benchmarks/kernel.py

bench-quantisation: $(VENV)/.dev model ## Weights in int8 and int4: accuracy and speed
	$(BIN)/python benchmarks/quantisation.py

bench-hop: $(VENV)/.dev model ## What a layer's hop to the CPU costs
	$(BIN)/python benchmarks/hop.py

bench-overlap: $(VENV)/.dev model ## Pipelined iteration time over the longer side's
	$(BIN)/python benchmarks/overlap.py

bench-planner: $(VENV)/.dev ## Rates that keep targets, bursts and the cost of a plan, simulated
	$(BIN)/python benchmarks/planner.py

bench-planner-full: $(VENV)/.dev ## The same on every machine and workload, beside every baseline: hours; goes on where it was interrupted
	$(BIN)/python benchmarks/planner.py --full --jobs $$(nproc) --cells build/sweep-$$(git rev-parse --short HEAD).jsonl

bench-baselines: $(VENV)/.dev ## The simulator's baselines beside their published figures
	$(BIN)/python benchmarks/baselines.py

bench-estimate: $(VENV)/.dev model ## Predicted against measured iteration time of the real stack
	$(BIN)/python benchmarks/estimate.py

bench-realtime: $(VENV)/.dev model ## The simulator against the real stack in real time
	$(BIN)/python benchmarks/realtime.py

bench-gateway: $(VENV)/.dev model ## The same load by gRPC and by HTTP
	$(BIN)/python benchmarks/gateway.py

bench-policies: $(VENV)/.dev ## Policies for models larger than the GPU, by estimate, beside published figures
	$(BIN)/python benchmarks/policies.py

bench-policy-check: $(VENV)/.dev model ## Predicted against measured time of each policy, on a device too small for the model
	$(BIN)/python benchmarks/policy_check.py

bench-telemetry: $(VENV)/.dev model ## What telling Prometheus or a collector costs
	$(BIN)/python benchmarks/telemetry.py

bench-offloading: $(VENV)/.dev model ## Policies beside transformers with accelerate's device_map
	$(BIN)/python benchmarks/offloading.py

gpu-check: $(VENV)/.runtime ## Prove and measure the executor on this machine's GPU: docs/gpu.md
	@PYTHON=$(BIN)/python benchmarks/gpu_check.sh

clean: ## Remove what was built
	rm -rf build $(VENV) neoflex/v1 $(addsuffix /*.so,svc_common/tensor_plane svc_common/cpu_kernels cpu_attn_svc)

$(VENV)/.python:
	@sh tools/check_machine.sh "$(PYTHON)"
	@$$(sh tools/check_machine.sh --python "$(PYTHON)") -m venv $(VENV)
	@touch $@

$(VENV)/.runtime: $(VENV)/.python $(BUILD_INPUTS)
	@echo 'Installing into $(VENV) and compiling; the first time takes minutes.'
	@$(BIN)/pip install --quiet --constraint constraints.txt $(PIP_ARGS) --editable .
	@touch $@

# One build for both stamps: the tests' environment serves the demo, too.
$(VENV)/.dev: $(VENV)/.python $(BUILD_INPUTS)
	@echo 'Installing into $(VENV) and compiling; the first time takes minutes.'
	@$(BIN)/pip install --quiet --constraint constraints.txt $(PIP_ARGS) --editable '.[dev]'
	@touch $(VENV)/.runtime $@
