"""`relax-train --plan`: memory and time of a run before it starts, from sizes alone.

`plan(config)` is a pure function of settings, the model's sizes and a small table of devices; nothing here
imports torch. `plan_trainer` plans an optimizer step on given samples, which benchmarks/plan measures.
"""

from typing import TYPE_CHECKING

from relax_core.lazy import lazy_names

if TYPE_CHECKING:
    from relax_core.plan.build import plan
    from relax_core.plan.devices import DEVICES, DeviceSpec
    from relax_core.plan.result import DeviceUse, Plan
    from relax_core.plan.trainer import TrainerPlan, plan_trainer
    from relax_core.plan.workload import Workload

__all__ = [
    "DEVICES",
    "DeviceSpec",
    "DeviceUse",
    "Plan",
    "TrainerPlan",
    "Workload",
    "plan",
    "plan_trainer",
]

__getattr__ = lazy_names(
    __name__,
    {
        "DEVICES": "devices",
        "DeviceSpec": "devices",
        "DeviceUse": "result",
        "Plan": "result",
        "TrainerPlan": "trainer",
        "Workload": "workload",
        "plan": "build",
        "plan_trainer": "trainer",
    },
)
