#!/bin/bash
# A SLURM cluster of some nodes on this machine: on its loopback alone, without systemd, cgroups or accounting, niced.
#   start.sh FOLDER [NODES] [CPUS_PER_NODE]    then    export SLURM_CONF=FOLDER/slurm.conf PATH=FOLDER/bin:$PATH
# For root, and for a user whose own jobs it then runs. Debian and Ubuntu: slurmctld slurmd munge slurm-client.
set -euo pipefail
DIR=$(realpath -m "$1") NODES=${2:-2} CPUS=${3:-1} PORT=${SLURM_TEST_PORT:-16817} NICE=${SLURM_TEST_NICE:-15} PATH=$PATH:/usr/sbin
[ ${#DIR} -lt 80 ] || { echo "start.sh: $DIR is too long for the name of a socket: take a shorter folder" >&2; exit 2; }
for program in munged slurmctld slurmd sbatch; do
    command -v $program > /dev/null || { echo "start.sh: no $program: apt-get install slurmctld slurmd munge slurm-client" >&2; exit 2; }
done
mkdir -p "$DIR"/{state,spool,log,munge,socket,bin}
chmod 755 "$DIR" "$DIR/socket"; chmod 700 "$DIR/munge"
[ -s "$DIR/munge/key" ] || (umask 077; head -c 1024 /dev/urandom > "$DIR/munge/key")
nice -n $NICE munged --force --key-file="$DIR/munge/key" --socket="$DIR/socket/munge" --pid-file="$DIR/munge/pid" \
    --log-file="$DIR/munge/log" --seed-file="$DIR/munge/seed" --num-threads=2
cat > "$DIR/slurm.conf" <<CONF
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
SlurmctldPort=$PORT
AuthType=auth/munge
AuthInfo=socket=$DIR/socket/munge
CredType=cred/munge
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
SlurmctldPidFile=$DIR/slurmctld.pid
SlurmdPidFile=$DIR/slurmd.%n.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
MinJobAge=300
KillWait=5
OverTimeLimit=0
SlurmctldTimeout=30
SlurmdTimeout=30
JobRequeue=1
DefMemPerCPU=1000
GresTypes=gpu
PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP
CONF
for node in $(seq "$NODES"); do
    echo "NodeName=n$node NodeHostname=localhost NodeAddr=127.0.0.1 Port=$((PORT + node)) CPUs=$CPUS RealMemory=6000 Gres=gpu:1" >> "$DIR/slurm.conf"
    echo "NodeName=n$node Name=gpu File=/dev/null"  # a device has to be named, and any does
done > "$DIR/gres.conf"
# Snakemake's jobs drop SLURM_CONF before their srun, which would then look for /etc/slurm/slurm.conf.
printf '#!/bin/sh\nSLURM_CONF=%s exec /usr/bin/srun "$@"\n' "$DIR/slurm.conf" > "$DIR/bin/srun"
chmod +x "$DIR/bin/srun"
export SLURM_CONF=$DIR/slurm.conf
nice -n $NICE slurmctld -f "$SLURM_CONF"
for node in $(seq "$NODES"); do nice -n $NICE slurmd -f "$SLURM_CONF" -N "n$node"; done
for _ in $(seq 120); do
    [ "$(sinfo -h -N -o %T 2> /dev/null | grep -c '^idle')" != "$NODES" ] || exit 0
    sleep 0.5
done
echo "start.sh: nodes are not idle after a minute; $DIR/log says why" >&2
exit 1
