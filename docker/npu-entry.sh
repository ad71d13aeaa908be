#!/usr/bin/env bash
# Runs a command in the environment of CANN, ATB and the Ascend NPU IR, as far as they are installed.
# Without -e and -u: the scripts read here were written for neither. What is missing the doctor tells.

# A function, for a script would take the words of the command for its own options.
load() {
    local script="${1}"
    shift
    # shellcheck disable=SC1090
    [[ -r "${script}" ]] && source "${script}"
}

load /usr/local/Ascend/ascend-toolkit/set_env.sh
load /usr/local/Ascend/nnal/atb/set_env.sh
load /usr/local/Ascend/cann-9.0.0/share/info/ascendnpu-ir/bin/set_env.sh

# The base image puts a folder of stand-ins for the driver's libraries before the driver's own.
driver=/usr/local/Ascend/driver/lib64
if [[ -d "${driver}" ]]; then
    export LD_LIBRARY_PATH="${driver}:${driver}/common:${driver}/driver${LD_LIBRARY_PATH:+:${LD_LIBRARY_PATH}}"
fi
exec "$@"
