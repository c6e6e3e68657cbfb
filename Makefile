# The two commands are `make demo` and `make test`; both set up everything they need in .venv and say what they do.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
INSTALL := install --quiet --disable-pip-version-check --no-compile  # Python compiles what tests import, which is a small part
PIP := $(BIN)/python -m pip $(INSTALL)

# Some shells and images turn compiled modules off; each of the hundreds of processes that tests start would compile them anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test lint unit suite docs package fuzz mutations test-browser test-patience test-ceph test-servers test-pythons test-tensorflow test-tensorflow-io test-jax test-lightning test-transformers test-webdataset test-huggingface test-feeds test-doors test-ray test-ray-kills test-fsspec test-mosaicml test-checkpoints test-lambda test-gateway test-deploy test-fuse test-bench bench clean
.SECONDARY:

help:  ## What there is to run
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 18

# PyTorch first and by itself: a CPU build where pip finds one, before anything can ask for another.
$(VENV)/.ready: pyproject.toml
	@echo "== set-up: $(VENV) with penstock, PyTorch and the test tools (once)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade 'pip>=25.1'
	$(PIP) $(TORCH)
	$(PIP) --editable '.[torch,image,processes,audio,parquet,zstd,fsspec,gateway,bench]' --group dev
	@touch $@

demo: $(VENV)/.ready  ## Write a real data set to an embedded S3 server, stream it back, train, verify (2 minutes)
	@echo "== demo: examples/embedded_store.py runs examples/digits.py against a server of its own"
	$(BIN)/python examples/embedded_store.py

BEGUN := $(shell date +%s)
test: unit  ## Everything: lint, types, layers, unit and real-server tests
	$(MAKE) --no-print-directory -j 2 lint suite  # lint is one process, and the suite waits often
	@echo "== make test: everything passed, in $$(( $$(date +%s) - $(BEGUN) )) seconds"

lint: $(VENV)/.ready  ## ruff, mypy --strict, import-linter
	@echo "== lint"
	$(BIN)/ruff check src tests bench examples docs/*/*.py
	$(BIN)/ruff format --check src tests bench examples docs/*/*.py
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(VENV)/.ready  ## Offline tests, none of which takes seconds
	@echo "== unit tests"
	$(BIN)/python -m pytest tests/unit tests/style -q -n 2 --max-worker-restart 0 -m 'not server'

suite: $(VENV)/.ready  ## Contracts, properties, and tests against real servers on loopback
	@echo "== contract, property and integration tests"
	[ "$$(id -u)" != 0 ] || [ ! -e /dev/fuse ] || chmod 666 /dev/fuse  # as udev's rule does, which some machines lack: ordinary users mount, too
	$(BIN)/python -m pytest tests/integration -q -n 3 --max-worker-restart 0 -m 'not heavy'  # three at once, for they wait for processes and servers
	$(BIN)/python -m pytest tests/contract tests/property -q -n 3 --max-worker-restart 0 -m 'not heavy'  # in processes of their own, for each holds 2 GB at its end
	$(BIN)/python -m pytest tests/unit -q -n 3 --max-worker-restart 0 -m 'server and not heavy'

fuzz: $(VENV)/.ready  ## Random jobs of the loader and new examples of the property tests: SECONDS=600 SEED=0; or one job again: CASE="Case(...)"
	PYTHONPATH=tests $(BIN)/python -m fuzzing --seconds $(or $(SECONDS),600) --seed $(or $(SEED),0) --case "$(CASE)"
	$(if $(CASE),,$(BIN)/python -m pytest tests/property tests/unit -q -m 'hypothesis and not server' --hypothesis-profile=search --hypothesis-seed=$(or $(SEED),0))

# The Pythons of pyproject.toml's classifiers: from the path, or as pyenv keeps them.
PYTHONS := 3.11 3.12 3.13 3.14
MAIN_JOB := $(patsubst %,tests/integration/test_%.py,demo loader_s3 loader_processes loader_formats pack_s3 cache fork)
python_of = $(firstword $(foreach each,python$1 $(wildcard $(HOME)/.pyenv/versions/$1.*/bin/python),$(shell $(each) -c '' 2> /dev/null && echo $(each))))

pythons_here = $(foreach each,$(PYTHONS),$(if $(call python_of,$(each)),$(each)))

test-pythons:  ## Unit tests and the suite of the main job on each Python that this machine has, in environments of their own; or PYTHONS=3.13
	@echo "== Pythons that this machine lacks, skipped: $(or $(filter-out $(pythons_here),$(PYTHONS)),none)"
	for version in $(pythons_here); do $(MAKE) --no-print-directory test-python$$version; done

test-python%: .venvs/python%/.ready
	@echo "== tests on Python $*"
	.venvs/python$*/bin/python -m pytest tests/unit -q -n 2 --max-worker-restart 0 -m 'not server'
	.venvs/python$*/bin/python -m pytest $(MAIN_JOB) -q -n 2 --max-worker-restart 0
	rm -rf $(<D)

.venvs/python%/.ready: pyproject.toml
	@echo "== set-up: $(@D) with penstock, the test tools, and PyTorch if pip finds a CPU build for this Python (once)"
	rm -rf $(@D)
	$(call python_of,$*) -m venv $(@D)
	$(@D)/bin/python -m pip $(INSTALL) --upgrade 'pip>=25.1'
	$(@D)/bin/python -m pip $(INSTALL) $(TORCH)+cpu 2> /dev/null || echo "== Python $*: no CPU build of PyTorch, its tests are skipped"
	$(@D)/bin/python -m pip $(INSTALL) --editable '.[image,processes,audio,parquet,zstd,fsspec,gateway,bench]' --group test --group demo
	@touch $@

mutations: $(VENV)/.ready  ## Break the most important contracts one by one: do tests notice? (5 minutes)
	$(BIN)/python tests/mutations.py

test-ceph: $(VENV)/.ready  ## The contract and integration suites on Ceph RGW (installs it where missing, as root)
	@echo "== tests on Ceph RGW"
	PENSTOCK_TEST_S3=ceph $(BIN)/python -m pytest tests/contract/test_s3.py tests/integration/test_keys.py tests/integration/test_loader_s3.py tests/integration/test_doors_s3.py \
		tests/integration/test_cli.py tests/integration/test_bad_input.py tests/integration/test_claims.py -q -n 2 -m server

test-browser: $(VENV)/.ready  ## The gateway's status page and pages of benchmarks in headless Chromium (installs Debian's where missing, as root)
	@echo "== tests in Chromium"
	command -v chromium > /dev/null || { apt-get update -qq && apt-get install -qq -y chromium > /dev/null; }
	$(BIN)/python -m pytest tests/doors/browser -q

test-servers: $(VENV)/.ready  ## The contract and claims suites on moto and on rclone serve s3
	for server in moto rclone; do \
		echo "== tests on $$server"; \
		PENSTOCK_TEST_S3=$$server $(BIN)/python -m pytest tests/contract/test_s3.py::TestS3Store tests/integration/test_claims.py -q -m server || exit 1; \
	done

# The suites of frameworks that are too heavy for `make test`, each in an environment of its own. It lies on $(VENV): it holds what
# $(VENV) lacks, or has in another version, and comes first on the path. So PyTorch, penstock and the test tools are installed once.
FRAMEWORK_tensorflow := tensorflow-cpu
FRAMEWORK_tensorflow-io := tensorflow-cpu==2.16.2 tensorflow-io==0.37.1 'numpy<2' 'opencv-python-headless<4.11'  # the last pair that loads together
FRAMEWORK_jax := jax flax orbax-checkpoint
FRAMEWORK_lightning := lightning pytorch-lightning
FRAMEWORK_transformers := transformers accelerate safetensors 'datasets>=4'
FRAMEWORK_webdataset := 'webdataset==1.*'
FRAMEWORK_webdataset-old := 'webdataset==0.2.*'
FRAMEWORK_huggingface := 'datasets>=4'
FRAMEWORK_feeds := grain spdl nvidia-dali-cuda120
FRAMEWORK_doors := lightning 'datasets>=4' webdataset tensorflow-cpu jax
FRAMEWORK_ray := 'ray[train]>=2.50' 'datasets>=4'
FRAMEWORK_fuse := safetensors webdataset duckdb
FRAMEWORK_fsspec := pandas polars 'zarr>=3' 'datasets>=4' xarray h5netcdf 'dask[dataframe]' duckdb iopath
FRAMEWORK_torchdata := torchdata==0.9.0 iopath  # the last version with DataPipes
FRAMEWORK_docs := --group docs
FRAMEWORK_package := --group package
FRAMEWORK_deploy := kubernetes-validate
FRAMEWORK_mosaicml := mosaicml-streaming
FRAMEWORK_s3torchconnector := 's3torchconnector[dcp]==1.5.0' lightning
FRAMEWORK_bench := 'webdataset==1.*' 's3torchconnector[dcp]==1.5.0' minio s3fs==2026.6.0 'datasets>=4,<5.1' tensorflow-cpu litdata mosaicml-streaming torchdata==0.9.0 'ray[data]'
FRAMEWORK_gateway := s3torchconnector awscli s3fs minio pandas ministack  # ministack wants one version of botocore, which the others then take
UNWANTED_bench := torchvision
UNWANTED_mosaicml := torchvision  # its wheel is for the CUDA build of torch, and breaks the import

.venvs/%/.ready: $(VENV)/.ready
	@echo "== set-up: .venvs/$* with $(FRAMEWORK_$*) on $(VENV) (once)"
	rm -rf .venvs/$*
	$(PYTHON) -m venv --without-pip .venvs/$*
	folder=$$(cd $(VENV) && echo lib/python3*/site-packages); \
		echo "import site; site.addsitedir('$(CURDIR)/$(VENV)/$$folder')" > .venvs/$*/$$folder/venv.pth
	.venvs/$*/bin/python -m pip $(INSTALL) $(TORCH) $(FRAMEWORK_$*)
	$(if $(UNWANTED_$*),.venvs/$*/bin/python -m pip uninstall --quiet --yes $(UNWANTED_$*))
	ln -s $(CURDIR)/$(BIN)/penstock $(CURDIR)/$(BIN)/rclone .venvs/$*/bin
	@touch $@

test-tensorflow: .venvs/tensorflow/.ready .venvs/lambda/.ready  ## The TensorFlow door, in an environment of its own
	.venvs/tensorflow/bin/python -m pytest tests/doors/tensorflow -q -n 2

test-tensorflow-io: .venvs/tensorflow-io/.ready  ## tensorflow-io's S3 file system on the gateway and in penstock bench, in an environment of its own
	.venvs/tensorflow-io/bin/python -m pytest tests/doors/tensorflow_io -q
	.venvs/tensorflow-io/bin/python -m pytest tests/integration/test_bench_clients.py -q -k tfrecord

test-jax: .venvs/jax/.ready  ## The JAX examples, in an environment of their own
	.venvs/jax/bin/python -m pytest tests/doors/jax -q

test-lightning: .venvs/lightning/.ready  ## The Lightning example, in an environment of its own
	.venvs/lightning/bin/python -m pytest tests/doors/lightning -q -n 2

test-transformers: .venvs/transformers/.ready  ## safetensors, save_pretrained, Trainer and Accelerate beside Hugging Face's libraries, in an environment of its own
	.venvs/transformers/bin/python -m pytest tests/doors/transformers -q -n 2

test-webdataset: .venvs/webdataset/.ready .venvs/webdataset-old/.ready  ## s3:// in WebDataset 1.0 and 0.2, each in an environment of its own
	.venvs/webdataset/bin/python -m pytest tests/doors/webdataset -q
	.venvs/webdataset-old/bin/python -m pytest tests/doors/webdataset -q

test-huggingface: .venvs/huggingface/.ready  ## A pipeline as Hugging Face's IterableDataset, in an environment of its own
	.venvs/huggingface/bin/python -m pytest tests/doors/huggingface -q

test-feeds: .venvs/feeds/.ready  ## Grain, SPDL and DALI (on the CPU) fed by penstock, in an environment of their own
	.venvs/feeds/bin/python -m pytest tests/doors/feeds -q

test-doors: .venvs/doors/.ready  ## The same samples through every door, in an environment of all libraries; WRITE=--write-page writes docs/reference/doors.md
	.venvs/doors/bin/python -m pytest tests/doors/matrix -q $(WRITE)

test-ray: .venvs/ray/.ready  ## Workers of a loader, packing and filling on a Ray cluster of several nodes, and packing from Hugging Face's data sets, Ray Data on S3, and Ray Train, in an environment of its own
	.venvs/ray/bin/python -m pytest tests/doors/ray -q -m 'not heavy'

test-ray-kills: .venvs/ray/.ready  ## Workers of a loader killed a hundred times, on a Ray cluster and without one
	.venvs/ray/bin/python -m pytest tests/doors/ray tests/integration/test_loader_landing.py -q -m heavy

test-fsspec: .venvs/fsspec/.ready .venvs/torchdata/.ready  ## The file system for fsspec and the handler for iopath, and the libraries that use them, in environments of their own
	.venvs/fsspec/bin/python -m pytest tests/doors/fsspec -q -n 2
	.venvs/torchdata/bin/python -m pytest tests/doors/torchdata -q

.venvs/lambda/.ready: tests/integration/gateway/lambda_handlers/article/requirements.txt $(VENV)/.ready
	@echo "== set-up: .venvs/lambda with the dependencies of a Lambda handler of 2021 (once)"
	rm -rf .venvs/lambda
	$(PYTHON) -m venv --without-pip .venvs/lambda
	$(BIN)/python -m pip --python .venvs/lambda/bin/python $(INSTALL) -r $<
	.venvs/lambda/bin/python -m grpc_tools.protoc -I $(<D) --python_out=`.venvs/lambda/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'` example.proto
	@touch $@

.venvs/lambda-old/.ready: $(VENV)/.ready
	@echo "== set-up: .venvs/lambda-old with a botocore that does not know AWS_ENDPOINT_URL_S3 (once)"
	rm -rf .venvs/lambda-old
	$(PYTHON) -m venv --without-pip .venvs/lambda-old
	$(BIN)/python -m pip --python .venvs/lambda-old/bin/python $(INSTALL) 'boto3==1.26.0'
	@touch $@

test-lambda: $(VENV)/.ready .venvs/lambda/.ready .venvs/lambda-old/.ready  ## Whole handlers of S3 Object Lambda in the gateway, one of them with NumPy 1, in environments of their own
	$(BIN)/python -m pytest tests/integration/gateway/test_lambda_handlers.py -q

test-mosaicml: .venvs/mosaicml/.ready  ## The MDS that packing writes, read by MosaicML Streaming, in an environment of its own
	.venvs/mosaicml/bin/python -m pytest tests/doors/mosaicml -q

test-s3torchconnector: .venvs/s3torchconnector/.ready  ## The S3 Connector for PyTorch and penstock in its place, side by side, in an environment of its own
	.venvs/s3torchconnector/bin/python -m pytest tests/doors/s3torchconnector -q -n 2

test-patience: $(VENV)/.ready  ## A store that comes back after 30 and 90 s under everything that uses one
	$(BIN)/python -m pytest tests/integration/test_patience.py -q -n 2 -m heavy

test-checkpoints: $(VENV)/.ready  ## Checkpoints of ranks that are killed, with 1, 2 and 4 ranks, at many random moments
	$(BIN)/python -m pytest tests/integration/checkpoints -q -n 2 -m heavy

test-gateway: $(VENV)/.ready .venvs/gateway/.ready  ## The gateway's processes and store contract; boto3, the AWS CLI, s3fs, s3torchconnector, rclone, minio's SDK
	$(BIN)/python -m pytest tests/contract tests/integration/gateway -q -n 3 -m heavy
	.venvs/gateway/bin/python -m pytest tests/doors/gateway -q -n 2

test-deploy: .venvs/deploy/.ready  ## The manifests in deploy/ by the schemas of Kubernetes and systemd, in an environment of its own
	.venvs/deploy/bin/python -m pytest tests/doors/deploy -q

test-fuse: $(VENV)/.ready .venvs/fuse/.ready  ## The mount and the channels on the real kernel, and programs and libraries on a mount, in an environment of its own (installs rsync, fio and fuse3 where missing, as root)
	@echo "== tests of programs on a mount"
	type rsync fio fusermount3 &> /dev/null || { apt-get update -qq && apt-get install -qq -y rsync fio fuse3 > /dev/null; }
	[ "$$(id -u)" != 0 ] || chmod 666 /dev/fuse
	$(BIN)/python -m pytest tests/integration/mount tests/integration/channels -q -n 2 -m heavy
	.venvs/fuse/bin/python -m pytest tests/doors/fuse -q -n 2

test-bench: .venvs/bench/.ready  ## The clients of penstock bench, each library on each format that it reads, in an environment of all libraries
	.venvs/bench/bin/python -m pytest tests/integration/test_bench_clients.py -q

docs: .venvs/docs/.ready  ## The documentation as a site in site/VERSION, its links checked
	rm -rf site
	NO_MKDOCS_2_WARNING=1 .venvs/docs/bin/mkdocs build --quiet --strict
	.venvs/docs/bin/python docs/tools/links.py site/[0-9]*

package: export SOURCE_DATE_EPOCH := $(shell git log -1 --format=%ct 2> /dev/null || echo 1580601600)
package: .venvs/package/.ready  ## Build wheel and sdist (twice: the same bytes), check their metadata, install the wheel without extras and with each
	rm -rf dist build
	.venvs/package/bin/python -m build --quiet
	umask 077 && TZ=Asia/Tokyo .venvs/package/bin/python -m build --quiet --outdir build
	cmp dist/*.whl build/*.whl && cmp dist/*.tar.gz build/*.tar.gz && rm -r build
	.venvs/package/bin/twine check --strict dist/*
	$(PYTHON) tests/install.py dist/*.whl

bench: $(VENV)/.ready .venvs/tensorflow/.ready  ## Peers, servers and every benchmark (hours); one question: make bench, then python bench/X.py
	bash bench/setup.sh
	for question in small_objects large_objects event_loops listing import_time memory tar_parse shuffle_quality samples single_objects compat_connector checkpoints dcp checkpoint_stall small_samples libraries tokens tables first_batch resume busy_step \
		cache random_access packing converting coalesce advise gateway gateway_transforms gateway_tensorflow gateway_lambda gateway_clients webdataset_clients tensorflow_ways mount channels channel_modes fsspec_clients; do $(BIN)/python bench/$$question.py; done

clean:  ## Remove what set-up and runs made
	rm -rf $(VENV) .venvs bench/.venvs site dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
