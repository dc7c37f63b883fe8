#!/usr/bin/env bash
# Creates the Python environment that all nodes share, once.
#
#   environment.sh DIRECTORY REQUIREMENT...
#
# Runs as root on the head node, and installs as the training user. An incomplete environment, or one with other requirements,
# is recreated.
set -euo pipefail

directory=$1
shift
user=ubuntu
requirements=$(printf '%s\n' "$@")
installed=$directory/requirements.txt # written last

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
printf '%s\n' "$requirements" >"$installed"
