"""The feature support table, from the capability table and the schema snapshots."""

from relax_npu.operators.table import BY_TORCH, CAPABILITIES, Capability
from relax_npu.schema import snapshots
from relax_npu.upstream.mindspeed_fixes import FIXES


def releases_with(capability: Capability) -> list[str]:
    """The releases that have every operator a capability needs."""
    packages = {s.package for s in snapshots() if set(capability.needs) & s.names}
    return [
        f"{s.package} {s.release}"
        for s in snapshots()
        if s.package in packages and set(capability.needs) <= s.names
    ]


def operator_rows() -> list[list[str]]:
    """Operator, what runs, dtypes, what is left to torch, gradient, what a device must confirm."""
    rows = [
        [
            f"`{c.operator}`",
            c.runs,
            ", ".join(c.dtypes),
            c.limits,
            c.backward,
            ", ".join(releases_with(c)),
            c.confirm,
        ]
        for c in CAPABILITIES
    ]
    return rows + [
        [f"`{name}`", f"torch: {why}", "all", "none", "autograd", "-", "speed"]
        for name, why in BY_TORCH.items()
    ]


def fix_rows() -> list[list[str]]:
    """Name, versions and fault of each correction of MindSpeed."""
    return [[fix.name, f"{fix.distribution} {', '.join(fix.versions)}", fix.wrong] for fix in FIXES]


def schema_report() -> str:
    """Which operator signatures are relied on and in which releases they hold."""
    lines = []
    names = sorted({name for s in snapshots() for name in s.schemas})
    for name in names:
        holding = [f"{s.package} {s.release}" for s in snapshots() if name in s.schemas]
        lines.append(f"{name}: {', '.join(holding)}")
        texts = {s.schemas[name].text for s in snapshots() if name in s.schemas}
        lines += [f"    {text}" for text in sorted(texts)]
    return "\n".join(lines)
