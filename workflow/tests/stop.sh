#!/bin/bash
# stop.sh FOLDER: ends the jobs of the cluster that start.sh has started there, and its daemons, by their ids.
DIR=$(realpath "$1") && export SLURM_CONF="$DIR/slurm.conf" || exit
scancel -u "$(id -un)" 2> /dev/null
for _ in $(seq 20); do [ -z "$(squeue -h 2> /dev/null)" ] && break; sleep 0.5; done
pids=$(cat "$DIR"/slurmd.*.pid "$DIR"/slurmctld.pid "$DIR"/munge/pid 2> /dev/null)
kill $pids 2> /dev/null
for _ in $(seq 40); do kill -0 $pids 2> /dev/null || break; sleep 0.5; done
exit 0
