"""What Ray reads from the environment, when it is first imported and in every process it starts."""

import logging
import os
import secrets

from relax_core.cluster.config import ClusterConfig

_ALWAYS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
_OWN = {
    # Makes Ray stay on the loopback, whatever its name says.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Ray ends processes once the machine's memory is nearly used up, whoever uses it.
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_gcs_server_request_timeout_seconds": "300",
    # Ray starts a process for every CPU beforehand, and waits for them; a run starts those that it needs.
    "RAY_prestart_worker_first_driver": "0",
}

_ADDRESS = "RAY_ADDRESS"

_log = logging.getLogger(__name__)


def with_address(config: ClusterConfig) -> ClusterConfig:
    """`config` with the address that Ray's own variable names, as in a job of Ray, where it has none.

    Raises:
        ValueError: what is set for a Ray of the run's own is not for one that is joined.
    """
    address = os.environ.get(_ADDRESS)
    if config.address is not None or not address:
        return config
    _log.info("%s is %s: that Ray is joined", _ADDRESS, address)
    return ClusterConfig(**{**config.model_dump(), "address": address})


def set_environment(config: ClusterConfig) -> None:
    """Sets what the user has not set; called before Ray is imported, which keeps what it has read.

    A Ray of the run's own is locked by a token that only this process and its children know. In a process
    that had imported Ray before it listens on the host's address instead of the loopback, locked as well.
    """
    values = _ALWAYS
    if config.address is None:
        values = {**_ALWAYS, **_OWN}
        if "RAY_AUTH_TOKEN_PATH" not in os.environ:
            values["RAY_AUTH_TOKEN"] = secrets.token_hex(24)
        # That a token is asked for, which is Ray's default.
        logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    for name, value in values.items():
        os.environ.setdefault(name, value)
