#!/usr/bin/env bash
# Start PEs with Open MPI's mpirun (4 or 5). The PEs need no MPI themselves.
#
#   launch/mpirun.sh 8                                    the demo on 8 PEs of this host
#   launch/mpirun.sh 8 python train.py --steps 100        your own program
#   HOSTS=node0:8,node1:8 MASTER_ADDR=node0 launch/mpirun.sh 16    8 PEs on each of two hosts
#
# Variables:
#   HOSTS       host:slots, rank 0's first.
#   MASTER_ADDR rank 0's host. Needed on several hosts, unless mpi4py is installed.
#   MASTER_PORT a port of it that is free (29511 unless set).
set -euo pipefail

pes=${1:-}
if ! [[ $pes =~ ^[1-9][0-9]*$ ]]; then
  echo "usage: $0 PES [COMMAND ...]" >&2
  exit 2
fi
shift
[ $# -gt 0 ] || set -- python -m persistent_ops demo

# The wheel mpich brings an mpirun too, which stands first on PATH in a virtual environment.
launcher=
while read -r found; do
  if [[ $("$found" --version 2>&1) == *"(Open"* ]]; then
    launcher=$found
    break
  fi
done < <(type -ap mpirun mpirun.openmpi)
if [ -z "$launcher" ]; then
  echo "$0: Open MPI's mpirun is not on PATH; run: apt-get install openmpi-bin" >&2
  exit 2
fi

# --bind-to none: Open MPI binds a process to one core otherwise, and a PE has several threads.
# OVERSUBSCRIBE: PEs of the host backend may be more than the cores.
options=(-n "$pes" --bind-to none --map-by :OVERSUBSCRIBE)
if [ -n "${HOSTS:-}" ]; then
  options+=(--host "$HOSTS")
  export MASTER_PORT=${MASTER_PORT:-29511}
fi
# mpirun passes on to other hosts only what -x names.
for name in PATH LD_LIBRARY_PATH PYTHONPATH VIRTUAL_ENV MASTER_ADDR MASTER_PORT; do
  [ -z "${!name:-}" ] || options+=(-x "$name")
done
exec "$launcher" "${options[@]}" "$@"
