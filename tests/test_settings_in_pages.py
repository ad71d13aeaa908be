"""Settings and environment variables that the pages name are there."""

import re
from pathlib import Path

import pytest
from relax_core.config import RelaxConfig
from relax_core.config.fields import rows_by_path
from relax_core.plan.fields import FIELDS
from relax_kernels.explanation import CALLS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("packages/*/README.md"))]
SETTINGS = {".".join(path) for path in rows_by_path(RelaxConfig)}
SECTIONS = "|".join(sorted({name.partition(".")[0] for name in SETTINGS}))
NAMED = re.compile(rf"`(?:[^`\n]* )?(?:--)?((?:{SECTIONS})\.[a-z_]+)(?=[ `=,])|--((?:{SECTIONS})\.[a-z_]+)")
VARIABLE = re.compile(r"\bRELAX_[A-Z0-9_]+\b")
OTHERS = {"alerts.jsonl", "mtp.fc", "mtp.norm", "trainer.rl"}
"""A file, tensors, and the mistake that the page of troubleshooting makes on purpose."""


def names(text: str) -> set[str]:
    return {first or second for first, second in NAMED.findall(text)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_setting_of_a_page_is_one(page: Path) -> None:
    fields = names("".join(f"`{field}`" for field in FIELDS)) if page.name == "plan.md" else set()
    assert not names(page.read_text()) - SETTINGS - OTHERS - fields


def test_the_settings_of_pages_are_found() -> None:
    assert names("`data.path`, `--rollout.engine sglang`, --trainer.lr 1") == {
        "data.path", "rollout.engine", "trainer.lr",
    }  # fmt: skip
    assert sum(len(names(page.read_text())) for page in PAGES) > 100


def test_every_environment_variable_of_a_page_is_read_somewhere() -> None:
    sources = [
        *ROOT.glob("packages/*/src/**/*.py"),
        *ROOT.glob("packages/*/*tests/**/*.py"),
        ROOT / "noxfile.py",
    ]
    read = set(VARIABLE.findall("\n".join(path.read_text() for path in sources)))
    named = {name for page in PAGES for name in VARIABLE.findall(page.read_text())}
    assert len(named) > 3
    # RELAX_KERNELS_<OPERATOR> chooses an operator's backend.
    operators = {f"RELAX_KERNELS_{name.upper()}" for name in CALLS}
    assert not named - read - operators
