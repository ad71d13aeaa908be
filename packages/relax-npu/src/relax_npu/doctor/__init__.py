"""Examines a machine for what the npu device needs: driver, CANN, torch_npu, environment.

>>> from relax_npu.doctor import examine
>>> report = examine()  # doctest: +SKIP
"""

from relax_npu.doctor.examine import examine
from relax_npu.doctor.finding import Finding, Report, Status
from relax_npu.doctor.machine import Machine

__all__ = ["Finding", "Machine", "Report", "Status", "examine"]
