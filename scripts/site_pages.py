"""Copies the repository's pages, and the files that they link to, to where mkdocs takes them from."""

import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / ".site" / "pages"
_LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def main() -> None:
    """Pages keep their places, so that links between them hold; the README is the first page."""
    shutil.rmtree(PAGES, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for page in (ROOT / line for line in listed.stdout.splitlines()):
        _copy(page, PAGES / page.relative_to(ROOT))
        for target in _LINK.findall(page.read_text()):
            linked = (page.parent / target).resolve()
            if "://" not in target and linked.suffix != ".md" and linked.is_file():
                _copy(linked, PAGES / linked.relative_to(ROOT))
    (PAGES / "README.md").rename(PAGES / "index.md")


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


if __name__ == "__main__":
    main()
