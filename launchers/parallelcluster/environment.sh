#!/usr/bin/env bash
# Makes the Python environment that all nodes share, once.
#
#   environment.sh FOLDER REQUIREMENT...
#
# Runs as root on the head node, and installs as the user who trains. An environment that was not finished, or is of other
# requirements, is made anew.
set -euo pipefail

folder=$1
shift
user=ubuntu
requirements=$(printf '%s\n' "$@")
made_of=$folder/requirements.txt # written last

if [[ -f $made_of && $(<"$made_of") == "$requirements" ]]; then
    echo "$folder is there"
    exit
fi
export DEBIAN_FRONTEND=noninteractive
apt-get --option DPkg::Lock::Timeout=600 update
apt-get --option DPkg::Lock::Timeout=600 install --yes python3-venv git
install --directory --owner "$user" --group "$user" "$(dirname "$folder")"
runuser --user "$user" -- python3 -m venv --clear "$folder"
runuser --user "$user" -- "$folder/bin/python" -m pip install --no-cache-dir \
    --extra-index-url https://pip.repos.neuron.amazonaws.com "$@"
printf '%s\n' "$requirements" >"$made_of"
