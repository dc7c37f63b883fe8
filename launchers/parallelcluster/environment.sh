#!/usr/bin/env bash
# Creates the Python environment that all nodes share, once.
#
#   environment.sh DIRECTORY REQUIREMENT...
#
# Runs as root on the head node, and installs as the training user. An incomplete environment, or one with other requirements,
# is recreated. Later installations with its pip keep torch and the packages of the accelerator: pip.conf names them as constraints.
set -euo pipefail

directory=$1
shift
user=ubuntu
requirements=$(printf '%s\n' "$@")
installed=$directory/requirements.txt # written last
accelerator_packages='^(torch|libneuronxla|neuronx|nki|nvidia-|triton|numpy)' # the pattern of docs/neuron.md

if [[ -f $installed && $(<"$installed") == "$requirements" ]]; then
    echo "$directory is there"
    exit
fi
export DEBIAN_FRONTEND=noninteractive
apt-get --option DPkg::Lock::Timeout=600 update
apt-get --option DPkg::Lock::Timeout=600 install --yes python3-venv git
install --directory --owner "$user" --group "$user" "$(dirname "$directory")"
runuser --user "$user" -- python3 -m venv --clear "$directory"
runuser --user "$user" -- "$directory/bin/python" -m pip install --no-cache-dir \
    --extra-index-url https://pip.repos.neuron.amazonaws.com "$@"
runuser --user "$user" -- "$directory/bin/python" -m pip list --format=freeze |
    grep --extended-regexp --ignore-case "$accelerator_packages" >"$directory/constraints.txt"
printf '[install]\nconstraint = %s\n' "$directory/constraints.txt" >"$directory/pip.conf"
printf '%s\n' "$requirements" >"$installed"
