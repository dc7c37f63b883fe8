#!/usr/bin/env bash
# Checks that this node has the devices of its instance type. A faulty node is drained, and ParallelCluster replaces it.
#
#   check_node.sh install neuron|gpu ACCELERATORS CARDS     on the head node, as root: install the check with the expected counts
#   check_node.sh                                           on a compute node: run by Slurm as Prolog and HealthCheckProgram
#
# The file `expected` next to the installed script has one line per check: a count and a file pattern, or a mount point.
set -euo pipefail

self=$(readlink --canonicalize "${BASH_SOURCE[0]}")
expected=$(dirname "$self")/expected

install_check() { # neuron|gpu accelerators cards
    local scripts=/opt/slurm/etc/scripts device=/dev/$1
    if [[ $1 == gpu ]]; then
        device=/dev/nvidia
    fi
    install -D --mode 755 "$self" "$scripts/hlat/check_node.sh"
    printf '%s\n' "$2 ${device}[0-9]*" "$3 /sys/class/infiniband/*" 'mounted /fsx' 'mounted /scratch' >"$scripts/hlat/expected"
    install --directory "$scripts/prolog.d"
    ln --symbolic --force ../hlat/check_node.sh "$scripts/prolog.d/10_hlat"
}

# Prints the failed checks on one line
missing() {
    local wanted pattern found failures=()
    while read -r wanted pattern; do
        if [[ $wanted == mounted ]]; then
            mountpoint --quiet "$pattern" || failures+=("$pattern is not mounted")
        else
            mapfile -t found < <(compgen -G "$pattern")
            ((${#found[@]} >= wanted)) || failures+=("${#found[@]} of $wanted $pattern")
        fi
    done <"$expected"
    local IFS=,
    echo "${failures[*]}"
}

if [[ ${1:-} == install ]]; then
    install_check "${@:2}"
    exit
fi
reason=$(missing)
if [[ -z $reason ]]; then
    exit
fi
if [[ -n ${SLURM_JOB_ID:-} ]]; then # after a failed prolog, Slurm drains the node and requeues the job
    echo "hlat: $reason" >&2
    exit 1
fi
PATH=/opt/slurm/bin:$PATH scontrol update "NodeName=$(hostname --short)" State=DRAIN "Reason=hlat: $reason"
