#!/usr/bin/env bash
# Has this node what its instance type has? A node that has not is drained, and ParallelCluster puts another in its place.
#
#   check_node.sh install neuron|gpu ACCELERATORS CARDS     on the head node, as root: what to expect, and before every job
#   check_node.sh                                           on a compute node: as Slurm's Prolog and HealthCheckProgram
#
# What is expected stands beside the installed script, a line each: how many files match a pattern, or what is mounted.
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

# Prints what is missing, on one line
missing() {
    local wanted pattern found told=()
    while read -r wanted pattern; do
        if [[ $wanted == mounted ]]; then
            mountpoint --quiet "$pattern" || told+=("$pattern is not mounted")
        else
            mapfile -t found < <(compgen -G "$pattern")
            ((${#found[@]} >= wanted)) || told+=("${#found[@]} of $wanted $pattern")
        fi
    done <"$expected"
    local IFS=,
    echo "${told[*]}"
}

if [[ ${1:-} == install ]]; then
    install_check "${@:2}"
    exit
fi
reason=$(missing)
if [[ -z $reason ]]; then
    exit
fi
if [[ -n ${SLURM_JOB_ID:-} ]]; then # Slurm drains the node of a prolog that fails, and requeues the job
    echo "hlat: $reason" >&2
    exit 1
fi
PATH=/opt/slurm/bin:$PATH scontrol update "NodeName=$(hostname --short)" State=DRAIN "Reason=hlat: $reason"
