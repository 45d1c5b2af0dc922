#!/usr/bin/env bash
# Measurements of docs/benchmarks.md that need a GPU, one after the other on one, unattended:
#
#   bash benchmarks/one_gpu.sh SHARDS OUT [PART...]
#
# SHARDS has folders of `bmoe prepare`: full (1,022 residues each), uniref90 (real lengths), both (with a valid split), and optionally
# structures/, mutations.csv.gz, wildtype.fasta. Each part has a time limit, writes OUT/PART.log (and .json) and fails alone; the last
# lines of each are printed. PARTs, the default being all, in this order; their limits add up to 66 minutes:
#   kernels step model fp8 host_memory experts te   tests against plain twins and float64
#   parallel                              price of the sharded paths over NCCL, and a checkpoint of a billion parameters
#   whole8 whole64 lengths                whole steps beside Hugging Face (COLUMN=... names the mutations' score column)
#   gain layer                            FP8 over bf16; one layer beside all baselines
#   memory steps emulation                the closed form, the roofline, overhead and repeatability, the price of emulation
#   evaluation perplexity                 speed of the evaluation; seconds to a perplexity
# Only where asked for: precision (emulation's tests) and profile (those of `bmoe profile`). In no part: trainings to a loss (of `bmoe train`,
# its 200 steps by every implementation, benchmarks/precision_table.py, benchmarks/dense_vs_moe.py), kills, and the counters of docs/kernels.md.
set -u
shards=$(realpath "${1:?folder of shards}") out=$(realpath -m "${2:?folder for the logs}"); shift 2
parts=(${*:-kernels step model fp8 host_memory experts te parallel whole8 whole64 lengths gain layer memory steps emulation evaluation perplexity})
cd "$(dirname "$0")/.." || exit 2
mkdir -p "$out"
export NO_COLOR=1 COLUMNS=170 OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
bmoe=(python3 -c "from bmoe.cli import main; main()")
tests=(python3 -m pytest -q --tb=short --show-capture=no -W ignore -p no:cacheprovider -s)

part() {  # NAME SECONDS COMMAND...: its whole output in OUT/NAME.log
  local name=$1 limit=$2 began=$SECONDS; shift 2
  timeout "$limit" "$@" > "$out/$name.log" 2>&1
  echo "== $name: exit $?, $((SECONDS - began)) s"
  grep -v "^DEBUG" "$out/$name.log" | tail -n 25 | cut -c1-200
}

profile() {  # NAME SECONDS RECIPE...
  local name=$1 limit=$2; shift 2
  part "$name" "$limit" "${bmoe[@]}" profile "$@" --json "$out/$name.json"
}

if ! python3 -c "import torch; print(torch.__version__, torch.cuda.get_device_name())" 2>/dev/null; then
  echo "this torch sees no GPU; run it on a machine that has one, with bmoe[dev,hf,fused] installed" >&2
  exit 2
fi
nvidia-smi --query-gpu=clocks.sm,temperature.gpu,power.draw --format=csv,noheader
for name in "${parts[@]}"; do
  case $name in
    kernels) part $name 200 "${tests[@]}" tests/kernels --ignore tests/kernels/test_experts_te.py ;;
    step | fp8 | precision | profile | host_memory) part $name 200 "${tests[@]}" "tests/gpu/test_$name.py" ;;
    model) part $name 400 "${tests[@]}" tests/gpu/test_model.py ;;  # most of it compiling
    experts) part $name 200 "${tests[@]}" tests/gpu/test_experts.py -k "not transformer_engine" ;;
    te) part $name 120 "${tests[@]}" tests/gpu/test_experts.py -k transformer_engine ;;  # alone: it loads a cuDNN of its own
    parallel) part $name 500 "${tests[@]}" tests/gpu/test_parallel.py ;;
    whole8) profile $name 200 benchmarks/mixtral_8_experts.yaml --set data.path="$shards/full" --baseline hf-grouped-compiled,hf-loop --forms padded ;;
    whole64) profile $name 240 benchmarks/mixtral_64_experts.yaml --set data.path="$shards/full" --baseline hf-grouped-compiled,hf-loop --forms padded ;;
    lengths) profile $name 240 benchmarks/mixtral_8_experts.yaml --set data.path="$shards/uniref90" --baseline hf-grouped-compiled ;;
    gain) part $name 120 python3 -u benchmarks/fp8_gain.py --repeats 11 --json "$out/$name.json" ;;
    layer) part $name 120 python3 -u benchmarks/moe_layer.py --experts hf-grouped-compiled,triton --routing natural ;;
    memory) part $name 250 python3 -u benchmarks/profile_accuracy.py --only memory --limit 240 --json "$out/$name.json" ;;
    steps) part $name 130 python3 -u benchmarks/profile_accuracy.py --only steps --limit 120 --json "$out/$name.json" ;;
    emulation) part $name 100 "${tests[@]}" tests/gpu/test_profile.py -k emulation ;;
    evaluation) part $name 90 python3 -u benchmarks/eval_speed.py --seconds 60 --structures "$shards/structures" --mutations "$shards/mutations.csv.gz" \
      --wildtype "$shards/wildtype.fasta" --column "${COLUMN:-2500}" --json "$out/$name.json" ;;
    perplexity) part $name 400 python3 -u benchmarks/time_to_perplexity.py "$shards/both" --perplexity 14.5 --set training.steps=500 --limit 120 --json "$out/$name.json" ;;
    *) echo "no part is called $name" >&2; exit 2 ;;
  esac
done
