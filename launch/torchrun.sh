#!/usr/bin/env bash
# Start PEs with torchrun.
#
#   launch/torchrun.sh 8                                  the demo on 8 PEs of this host
#   launch/torchrun.sh 8 python train.py --steps 100      your own program
#   NNODES=2 ENDPOINT=node0:29500 launch/torchrun.sh 8    on each of two hosts: 8 PEs per host, 16 in all
#
# Variables:
#   NNODES          number of hosts (1 unless set).
#   ENDPOINT        host:port where the hosts' agents meet; the same everywhere, needed on several hosts.
#   RUN_ID          name of the run, the same on all hosts.
#   OMP_NUM_THREADS torchrun sets it to 1 unless you do.
set -euo pipefail

pes=${1:-}
if ! [[ $pes =~ ^[1-9][0-9]*$ ]]; then
  echo "usage: $0 PES_PER_HOST [COMMAND ...]" >&2
  exit 2
fi
shift
[ $# -gt 0 ] || set -- python -m persistent_ops demo

if [ "${NNODES:-1}" -gt 1 ]; then
  endpoint=${ENDPOINT:?"$0: set ENDPOINT=host:port, the same on all hosts"}
  meeting=(--nnodes "$NNODES" --rdzv-backend c10d --rdzv-endpoint "$endpoint" --rdzv-id "${RUN_ID:-persistent_ops}")
else
  meeting=(--standalone)
fi
exec python -m torch.distributed.run "${meeting[@]}" --nproc-per-node "$pes" --no-python "$@"
