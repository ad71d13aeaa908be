"""What the doctor says: findings, each with a fix, and the report that they make."""

import enum
import json
from dataclasses import asdict, dataclass


class Status(enum.StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"  # it runs, perhaps slower or by luck
    ERROR = "error"  # it does not run
    UNKNOWN = "unknown"  # only a device can tell


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: its name, stable across releases.
        status: see `Status`.
        message: what was found.
        fix: what to do; None when all is well or nothing can be done.
    """

    check: str
    status: Status
    message: str
    fix: str | None = None


@dataclass(frozen=True)
class Report:
    """All findings of one examination.

    Attributes:
        relax_npu: the version that examined.
        findings: in the order in which they should be put right.
    """

    relax_npu: str
    findings: tuple[Finding, ...]

    def count(self, status: Status) -> int:
        """How many findings have that status."""
        return sum(finding.status is status for finding in self.findings)

    @property
    def ok(self) -> bool:
        """Whether nothing stands in the way."""
        return not self.count(Status.ERROR)

    @property
    def exit_code(self) -> int:
        """0 when nothing stands in the way, else 1."""
        return 0 if self.ok else 1

    def as_json(self) -> str:
        """The report for programs: one object with `ok`, `relax_npu` and `findings`."""
        return json.dumps({"ok": self.ok, **asdict(self)}, indent=2)

    def as_text(self) -> str:
        """The report for people."""
        lines = [f"relax-npu {self.relax_npu}"]
        for finding in self.findings:
            lines.append(f"{finding.status.value:>8}  {finding.check}: {finding.message}")
            if finding.fix:
                lines.append(f"{'fix':>8}  {finding.fix}")
        counts = f"{self.count(Status.ERROR)} errors, {self.count(Status.WARNING)} warnings"
        verdict = (
            "nothing stands in the way of the npu device" if self.ok else "the npu device will not work here"
        )
        return "\n".join([*lines, f"{counts}: {verdict}"])
