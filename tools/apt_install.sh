#!/usr/bin/env bash
# Installs Debian packages that are missing: as root, or through sudo when it asks no password.
# Otherwise says exactly what to run and fails.
#
#     tools/apt_install.sh PACKAGE...
set -euo pipefail

missing=()
for package in "$@"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q "ok installed" || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

run=()
if [ "$(id -u)" -ne 0 ]; then
    if sudo -n true 2>/dev/null; then
        run=(sudo -n)
    else
        echo "Missing: ${missing[*]}. Install them and run this again:" >&2
        echo "    sudo apt-get update && sudo apt-get install -y ${missing[*]}" >&2
        exit 1
    fi
fi
if ! command -v apt-get >/dev/null; then
    echo "Missing: ${missing[*]} (Debian names). There is no apt-get here: install them your system's way." >&2
    exit 1
fi
echo "installing ${missing[*]} with apt-get"
export DEBIAN_FRONTEND=noninteractive
${run[@]+"${run[@]}"} apt-get update -q >/dev/null
${run[@]+"${run[@]}"} apt-get install -y -q --no-install-recommends "${missing[@]}" >/dev/null
