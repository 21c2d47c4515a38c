#!/usr/bin/env bash
# A real Slurm of two nodes on this one machine, for as long as one command runs:
#
#     tests/launcher/slurm.sh                                  # the tests of launcher=slurm
#     tests/launcher/slurm.sh bash -c 'srun -n 2 hostname'     # any command
#
# Needs root and the programs of Debian's packages slurm-wlm and munge (apt-get install slurm-wlm munge); installs
# nothing, touches nothing under /etc, and ends its daemons by their process numbers.
set -euo pipefail
here=$(cd "$(dirname "$0")/../.." && pwd)
for program in munged mungekey slurmctld slurmd sbatch srun sinfo; do
    command -v "$program" >/dev/null || PATH=$PATH:/usr/sbin:/sbin
    command -v "$program" >/dev/null || { echo "$program is not there: apt-get install slurm-wlm munge" >&2; exit 2; }
done
[ "$(id -u)" = 0 ] || { echo "slurmd needs root" >&2; exit 2; }

work=$(mktemp -d)
chmod 755 "$work"
pids=()
finish() {
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null || true; done
    rm -rf "$work"
}
trap finish EXIT

host=$(hostname -s)
cores=$(getconf _NPROCESSORS_ONLN)
mkdir "$work"/{state,log}
cat >"$work/slurm.conf" <<CONF
ClusterName=here
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=16817
AuthType=auth/munge
AuthInfo=socket=$work/munge.socket
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool.%n
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.%n.pid
SlurmctldLogFile=$work/log/slurmctld
SlurmdLogFile=$work/log/slurmd.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1
MaxArraySize=1001
ReturnToService=2
KillWait=15
OverTimeLimit=0
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=16821 CPUs=$cores State=UNKNOWN
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=16822 CPUs=$cores State=UNKNOWN
PartitionName=debug Nodes=n1,n2 Default=YES MaxTime=60 State=UP
CONF
export SLURM_CONF=$work/slurm.conf
mungekey --create --keyfile="$work/munge.key"
munged --foreground --force --key-file="$work/munge.key" --socket="$work/munge.socket" \
    --pid-file="$work/munge.pid" --log-file="$work/log/munged" --seed-file="$work/munge.seed" &
pids+=($!)
until [ -S "$work/munge.socket" ]; do sleep 0.1; done
slurmctld -D -i & pids+=($!)
for node in n1 n2; do slurmd -D -N "$node" & pids+=($!); done
for _ in $(seq 100); do
    [ "$(sinfo --noheader --format=%T 2>/dev/null)" = idle ] && break
    sleep 0.3
done
sinfo --version
sinfo --format='%N %T %c'
cd "$here"
if [ $# = 0 ]; then
    set -- python -m pytest -q -m "not matrix" tests/launcher/test_slurm.py
fi
"$@"
