#!/bin/bash
# The same command on each of NODES machines; the first one is MASTER. Needs a shared file system for the run's folder.
#   NODES=2 NODE=0 MASTER=gpu01 ./torchrun.sh esm2_moe runs/esm2_moe        on gpu01
#   NODES=2 NODE=1 MASTER=gpu01 ./torchrun.sh esm2_moe runs/esm2_moe        on gpu02
set -euo pipefail
exec torchrun --nnodes "$NODES" --node-rank "$NODE" --nproc-per-node "${GPUS:-8}" \
    --master-addr "$MASTER" --master-port "${PORT:-29500}" \
    --no-python bmoe train "$1" --out "$2" --resume
