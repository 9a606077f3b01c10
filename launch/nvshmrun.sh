#!/usr/bin/env bash
# Start PEs with Hydra: nvshmrun where NVSHMEM brings it, else mpiexec.hydra (pip install mpich), which is the same.
#
#   launch/nvshmrun.sh 8                                  the demo on 8 PEs of this host
#   launch/nvshmrun.sh 8 python train.py --steps 100      your own program
#   HOSTS=node0,node1 launch/nvshmrun.sh 16               8 PEs on each of two hosts, reached by ssh without a password
#
# Variables:
#   HOSTS       the hosts, rank 0's first; the same paths must exist on all of them.
#   IFACE       the network interface that Hydra uses (hosts with several networks).
#   MASTER_ADDR rank 0's address, where the one of its default route is not the one that the others reach.
set -euo pipefail

pes=${1:-}
if ! [[ $pes =~ ^[1-9][0-9]*$ ]]; then
  echo "usage: $0 PES [COMMAND ...]" >&2
  exit 2
fi
shift
[ $# -gt 0 ] || set -- python -m persistent_ops demo

# Not "mpiexec": that may be another MPI's, whose variables are different.
launcher=$(command -v nvshmrun || command -v mpiexec.hydra) || {
  echo "$0: neither nvshmrun nor mpiexec.hydra is on PATH; run: pip install mpich" >&2
  exit 2
}
options=(-n "$pes")
if [ -n "${HOSTS:-}" ]; then
  commas=${HOSTS//[^,]/}
  hosts=$((${#commas} + 1))
  options+=(-hosts "$HOSTS" -ppn $(((pes + hosts - 1) / hosts)))
fi
[ -z "${IFACE:-}" ] || options+=(-iface "$IFACE")
# Hydra passes the whole environment on; its PMI connection (PMI_FD) must reach Python, so no program in between may
# close it.
exec "$launcher" "${options[@]}" "$@"
