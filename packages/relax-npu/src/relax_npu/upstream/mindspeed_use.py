"""Whether a run uses MindSpeed, and with which switches: RELAX_NPU_MINDSPEED.

Unset, empty or `0` leaves it out; `1` takes it with the run's parallel sizes; a JSON object takes it and adds
switches of its command line by name: `{"use_ascend_mc2": true}`.
"""

import importlib.util
import json
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

from relax_npu.upstream import mindspeed

logger = logging.getLogger(__name__)

VARIABLE = "RELAX_NPU_MINDSPEED"
# Set where MindSpeed's own validation of Megatron's command line, which Relax does without, would set it; the
# others are not there on the NPU.
ALWAYS: dict[str, Any] = {
    "use_flash_attn": True,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
}
_told = False


class MindSpeedSettingError(ValueError):
    """RELAX_NPU_MINDSPEED asks for what there is not."""


def switches(text: str | None) -> dict[str, Any] | None:
    """Reads a value of RELAX_NPU_MINDSPEED.

    Returns:
        Switches beside the parallel sizes, {} for none, or None when MindSpeed is not asked for.

    Raises:
        MindSpeedSettingError: the value is none of those.
    """
    if text in (None, "", "0"):
        return None
    if text == "1":
        return {}
    try:
        found = json.loads(str(text))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise MindSpeedSettingError(
            f"{VARIABLE}={text!r}; allowed: 0, 1, or a JSON object of MindSpeed's switches such as "
            '{"use_ascend_mc2": true}'
        )
    return {str(name).removeprefix("--").replace("-", "_"): value for name, value in found.items()}


def load_if_asked(parallel: Mapping[str, Any]) -> None:
    """Loads and repatches MindSpeed if RELAX_NPU_MINDSPEED says so; called before Megatron is initialised.

    Args:
        parallel: the sizes of the parallel axes under the names of megatron-core.

    Raises:
        MindSpeedSettingError: it is asked for and not installed, or the variable is malformed.
        MindSpeedOrderError, FixMismatchError: see `mindspeed.load`.
    """
    global _told
    wanted = switches(os.environ.get(VARIABLE))
    installed = importlib.util.find_spec("mindspeed") is not None
    if wanted is None:
        if installed and not _told:
            logger.info("MindSpeed is installed and not used; %s=1 uses it", VARIABLE)
        _told = True
        return
    if not installed:
        raise MindSpeedSettingError(
            f"{VARIABLE} asks for MindSpeed, which is not installed; install it as docker/Dockerfile.npu "
            f"does, or unset {VARIABLE}: Relax runs without it"
        )
    mindspeed.load({**ALWAYS, **parallel, **wanted}, initialised=_initialised())
    logger.info("MindSpeed is used, features: %s", ", ".join(features()) or "none")


def features() -> list[str]:
    """The names of MindSpeed's features that are on in this process, which has loaded it."""
    manager = importlib.import_module("mindspeed.features_manager.features_manager").MindSpeedFeaturesManager
    told = importlib.import_module("mindspeed.args_utils").get_full_args()
    on = [str(f.feature_name) for f in manager.FEATURES_LIST if f.is_need_apply(told)]
    return sorted(set(on))


def _initialised() -> bool:
    state = sys.modules.get("megatron.core.parallel_state")
    return state is not None and bool(state.model_parallel_is_initialized())
