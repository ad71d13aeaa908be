"""Writes the generated tables of docs/npu.md and docs/npu.zh.md: operators, corrections, versions."""

import argparse
import re
from pathlib import Path

from relax_npu.pins import load_pins
from relax_npu.support import fix_rows, operator_rows

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "docs" / "npu.md", ROOT / "docs" / "npu.zh.md")
BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
OPERATORS = ["operator", "runs", "dtypes", "left to torch", "gradient", "releases", "a device must confirm"]


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows]) + "\n"


def version_rows() -> list[list[str]]:
    """What the image holds."""
    pins = load_pins()
    rows = [["base image", pins.base_image], ["torch", pins.torch], ["torch-npu", pins.torch_npu]]
    rows += [[name, version] for name, version in sorted(pins.packages.items())]
    return rows + [
        [name, f"{source.release} {source.commit[:12]}".strip()]
        for name, source in sorted(pins.sources.items())
    ]


def blocks() -> dict[str, str]:
    """Every generated block by name."""
    return {
        "operators": table(OPERATORS, operator_rows()),
        "corrections": table(["correction", "made for", "without it"], fix_rows()),
        "versions": table(["package", "version"], version_rows()),
    }


def filled(text: str) -> str:
    """A page's text with its blocks as they should be."""
    made = blocks()
    return BLOCK.sub(lambda match: match.group(1) + made[match.group(2)] + match.group(3), text)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", required=True, help="write the pages")
    parser.parse_args()
    for page in PAGES:
        page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main()
