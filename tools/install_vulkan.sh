#!/usr/bin/env bash
# Sees to it that there is a Vulkan driver, if need be a software one (lavapipe), so that GPU tests run without a GPU.
# Where none can be installed it says so in one line and succeeds: the GPU tests are then skipped, nothing else is.
#
# COVEY_NO_VULKAN=1 leaves the system alone.
set -euo pipefail
cd "$(dirname "$0")/.."

[ "$(uname -s)" = Linux ] || exit 0 # elsewhere the system brings its own API
[ -z "${COVEY_NO_VULKAN:-}" ] || exit 0

any() {
    local pattern
    for pattern in "$@"; do
        if compgen -G "$pattern" >/dev/null; then return 0; fi
    done
    return 1
}
loader() { any "/usr/lib/*/libvulkan.so.1" "/usr/lib*/libvulkan.so.1" "/usr/local/lib*/libvulkan.so.1"; }
driver() { [ -n "${VK_DRIVER_FILES:-${VK_ICD_FILENAMES:-}}" ] || any "/usr/share/vulkan/icd.d/*.json" "/etc/vulkan/icd.d/*.json"; }
if loader && driver; then exit 0; fi
if ! tools/apt_install.sh mesa-vulkan-drivers libvulkan1 >/dev/null 2>&1; then
    echo "no Vulkan driver and none could be installed: GPU tests will be skipped (\`make gpu\` says why)"
fi
