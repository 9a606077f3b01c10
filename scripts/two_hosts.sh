#!/usr/bin/env bash
# Run a command with two hosts, made of this machine's namespaces: for tests of launchers and networks without a NIC.
#
#   scripts/two_hosts.sh COMMAND [ARGUMENT ...]
#
# COMMAND runs on a third host, the controller, and finds
#   on HOST COMMAND ...   runs a command on n1 or n2; Hydra and Open MPI take it in place of ssh
#   srun, sinfo           Debian's Slurm: slurmctld runs on the controller, slurmd on n1 and n2
#   mpirun.openmpi        Debian's Open MPI
#
# n1 and n2 have a host name, a network interface (eth0: 10.77.0.11 and 12, fd77::11 and 12) and a /dev/shm each. The
# other ends are v1 and v2 on the controller, at the bridge of 10.77.0.1. The hosts share processes, kernel and files.
# The packages are installed on a copy-on-write root in memory. What COMMAND writes outside of /tmp, HOME and the working
# directory vanishes with that root.
#
# Needs root, Debian and its packages. Exits with 77 where the hosts cannot be made, else as COMMAND does.
set -Eeuo pipefail

here=$(realpath "$0")
hosts=(n1 n2)
home=${HOME:-/root}

fail() {
  trap - ERR
  echo "$0: $1" >&2
  exit 77
}
trap 'fail "this step failed: $BASH_COMMAND"' ERR

# Stage 1, in a mount and a PID namespace: when its first process ends, all processes end.
in_namespace() {
  work=/media # an empty folder of every Debian; the mount is seen in this namespace alone
  mount -t tmpfs tmpfs "$work" -o size=3g
  mkdir "$work"/{upper,work,root}
  root=$work/root
  mount -t overlay overlay -o "lowerdir=/,upperdir=$work/upper,workdir=$work/work" "$root"
  mount -t proc proc "$root/proc"
  for folder in /dev /sys; do mount --rbind $folder "$root$folder"; done
  printf '#!/bin/sh\nexit 101\n' > "$root/usr/sbin/policy-rc.d" # the packages start no daemons
  chmod +x "$root/usr/sbin/policy-rc.d"
  packages="slurmctld slurmd slurm-client munge openmpi-bin"
  install="apt-get install -y --no-install-recommends $packages"
  chroot "$root" sh -c "$install || { apt-get update && $install; }" > "$work/apt.txt" 2>&1 || {
    tail -n 5 "$work/apt.txt" >&2
    fail "the packages of Slurm and Open MPI cannot be installed"
  }
  for folder in /tmp "$home" "$PWD"; do mount --rbind "$folder" "$root$folder"; done
  export root
  exec unshare --net --uts "$here" --controller "$@"
}

# Stage 2, with a network and a host name of its own: the hosts, Slurm, and the command.
as_controller() {
  hostname ctl
  configure
  ip link set lo up
  ip link add bridge type bridge
  ip address add 10.77.0.1/24 dev bridge
  ip address add fd77::1/64 dev bridge nodad
  ip link set bridge up
  for i in 1 2; do make_host $i; done
  chroot "$root" su -s /bin/sh munge -c "/usr/sbin/munged --force" > /dev/null 2>&1
  chroot "$root" slurmctld
  for host in "${hosts[@]}"; do chroot "$root" on $host slurmd -N $host; done
  for _ in $(seq 600); do
    idle=$(chroot "$root" sinfo -h -t idle -o %D 2> /dev/null || true)
    [ "$idle" != 2 ] || break
    sleep 0.1
  done
  [ "$idle" = 2 ] || fail "Slurm has not started within a minute"
  exec chroot "$root" sh -c 'cd "$1" && shift && exec "$@"' sh "$PWD" "$@"
}

make_host() {
  # A process that keeps the host's namespaces. Its start is over when it has a link of its own.
  unshare --net --uts --mount sh -c "hostname n$1; mount -t tmpfs tmpfs '$root/dev/shm'; exec chroot '$root' sleep infinity" &
  for _ in $(seq 500); do
    [ "$(cat "/proc/$!/comm")" != sleep ] || break
    sleep 0.02
  done
  [ "$(cat "/proc/$!/comm")" = sleep ] || fail "host n$1 has not started within 10 s"
  echo $! > "$root/run/n$1.pid"
  ip link add "v$1" type veth peer name eth0 netns $!
  ip link set "v$1" master bridge up
  on="nsenter --target $! --net"
  $on ip address add "10.77.0.1$1/24" dev eth0
  $on ip address add "fd77::1$1/64" dev eth0 nodad
  $on ip link set eth0 up
  $on ip link set lo up
}

configure() {
  cat > "$root/usr/local/bin/on" << 'ON'
#!/bin/sh
# on [-OPTION ...] HOST COMMAND ...: as ssh; several words are one command line of a shell.
while [ "${1#-}" != "$1" ]; do shift; done
pid=$(cat "/run/$1.pid") && shift || exit 255
exec nsenter --target "$pid" --net --uts --mount --root --wd sh -c "cd $PWD && $*"
ON
  chmod +x "$root/usr/local/bin/on"
  printf '127.0.0.1 localhost\n10.77.0.1 ctl\n10.77.0.11 n1\n10.77.0.12 n2\nfd77::11 n1\nfd77::12 n2\n' > "$root/etc/hosts"
  sed -i 's/^hosts:.*/hosts: files/' "$root/etc/nsswitch.conf" # there is no name server
  cat > "$root/etc/slurm/slurm.conf" << 'CONF'
ClusterName=two_hosts
SlurmctldHost=ctl
AuthType=auth/munge
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SlurmUser=root
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd-%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd-%n.pid
SlurmctldLogFile=/var/log/slurmctld.log
SlurmdLogFile=/var/log/slurmd-%n.log
SlurmdParameters=config_overrides
ReturnToService=2
NodeName=n[1-2] CPUs=8 State=UNKNOWN
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
CONF
  mkdir -p "$root"/var/spool/{slurmctld,slurmd-n1,slurmd-n2} "$root/run/munge"
  chroot "$root" sh -c 'head -c 1024 /dev/urandom > /etc/munge/munge.key
    chown munge: /run/munge /etc/munge /etc/munge/munge.key; chmod 400 /etc/munge/munge.key'
}

case ${1:-} in
  --namespace) shift && in_namespace "$@" ;;
  --controller) shift && as_controller "$@" ;;
  "" | -*) sed -n 's/^# \{0,1\}//; 2,/^set/ { /^set/! p }' "$here" >&2 && exit 2 ;;
  *)
    [ "$(id -u)" = 0 ] || fail "namespaces need root"
    command -v apt-get > /dev/null || fail "Debian's apt-get is missing"
    unshare --mount --net --uts --pid --fork true 2> /dev/null || fail "namespaces are not allowed here"
    for folder in "$home" "$PWD"; do # they are the machine's own folders there, and the root is written to
      case $folder/ in
        // | /bin/* | /boot/* | /etc/* | /lib*/* | /media/* | /run/* | /sbin/* | /usr/* | /var/*)
          fail "HOME and the working directory must not be $folder"
          ;;
      esac
    done
    unshare --mount --pid --fork --kill-child --mount-proc --propagation private "$here" --namespace "$@" <&0 &
    trap "kill -KILL $!" INT TERM # unshare and the first process of a namespace ignore both
    wait $! && exit 0 || exit $?
    ;;
esac
