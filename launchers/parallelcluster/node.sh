#!/usr/bin/env bash
# Prepares a compute node for training: pinned driver, runtime and tools, kernel settings, scratch directory on the local disk.
#
#   node.sh [PACKAGE=VERSION]...     packages of AWS's Neuron repository; none on GPU nodes
#
# Runs as root after the configuration of a node and before its first job. Installed packages are skipped, so the script is
# idempotent.
set -euo pipefail

keyring=/etc/apt/keyrings/neuron.asc
repository=https://apt.repos.neuron.amazonaws.com

is_installed() { # package version
    local found
    found=$(dpkg-query --show --showformat='${Version}' "$1" 2>/dev/null) || return 1
    [[ $found == "$2" || $found == "$2"-* ]] # a build's hash may follow
}

install_packages() {
    local wanted missing=()
    for wanted in "$@"; do
        is_installed "${wanted%%=*}" "${wanted#*=}" || missing+=("$wanted*")
    done
    if ((${#missing[@]} == 0)); then
        return
    fi
    install --directory --mode 755 "$(dirname "$keyring")"
    curl --fail --silent --show-error --location --retry 5 --output "$keyring" "$repository/GPG-PUB-KEY-AMAZON-AWS-NEURON.PUB"
    # shellcheck source=/dev/null
    echo "deb [signed-by=$keyring] $repository $(. /etc/os-release && echo "$VERSION_CODENAME") main" >/etc/apt/sources.list.d/neuron.list
    export DEBIAN_FRONTEND=noninteractive
    apt-get --option DPkg::Lock::Timeout=600 update
    apt-get --option DPkg::Lock::Timeout=600 install --yes --allow-downgrades --allow-change-held-packages \
        "linux-headers-$(uname --kernel-release)" "${missing[@]}"
    apt-mark hold "${missing[@]%%=*}"
    modprobe neuron
}

# The ports and sizes that the scripts of HLAT set (awslabs/HLAT)
set_kernel() {
    printf '%s\n' \
        'net.ipv4.ip_local_reserved_ports = 23456,41000,44000,48620' \
        'net.core.somaxconn = 65535' >/etc/sysctl.d/90-hlat.conf
    sysctl --load /etc/sysctl.d/90-hlat.conf
    if command -v lctl >/dev/null; then
        lctl set_param 'osc.*.max_dirty_mb=64'
    fi
}

install_packages "$@"
set_kernel
install --directory --mode 1777 /scratch
