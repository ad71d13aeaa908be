#!/usr/bin/env bash
# Runs a command in the environment of CANN, ATB and the Ascend NPU IR, as far as they are installed.
set -eo pipefail # no -u: the scripts below read variables that may not be set

for script in \
    /usr/local/Ascend/ascend-toolkit/set_env.sh \
    /usr/local/Ascend/nnal/atb/set_env.sh \
    /usr/local/Ascend/cann-9.0.0/share/info/ascendnpu-ir/bin/set_env.sh; do
    if [[ -r "${script}" ]]; then
        # shellcheck disable=SC1090
        source "${script}"
    fi
done
exec "$@"
