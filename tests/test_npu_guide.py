"""The guide of the NPU is current, and its translation keeps step."""

import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest
from relax_npu.operators.table import BY_TORCH, CAPABILITIES

COMMAND = re.compile(r"`((?:relax-npu|nox|relax-train) [^`]+)`")


@pytest.fixture(scope="module")
def page(script) -> ModuleType:
    return script("npu_page")


def test_the_generated_tables_are_current(page: ModuleType) -> None:
    for path in page.PAGES:
        text = path.read_text()
        assert len(page.BLOCK.findall(text)) == len(page.blocks())
        assert text == page.filled(text), "run `nox -s docs`"


def structure(path: Path) -> list[str]:
    """Levels of headings, and of each table row the number of its cells, in order."""
    told = []
    for line in path.read_text().splitlines():
        if heading := re.match(r"#+ ", line):
            told.append(heading.group())
        elif line.startswith("|"):
            told.append(str(line.count("|")))
        elif re.match(r"\d+\. ", line):
            told.append("step")
    return told


def test_the_translation_has_the_same_headings_tables_and_steps(page: ModuleType) -> None:
    english, chinese = page.PAGES
    assert structure(english) == structure(chinese)


def test_commands_stand_in_both(page: ModuleType) -> None:
    english, chinese = (set(COMMAND.findall(path.read_text())) for path in page.PAGES)
    assert english == chinese
    assert len(english) > 8


def test_every_command_is_one_of_ours(page: ModuleType, root: Path) -> None:
    """Each is parsed by its own program."""
    from relax_core.cli.options import parse_options
    from relax_npu.cli import _parser

    sessions = set(re.findall(r"^def (\w+)\(session", (root / "noxfile.py").read_text(), re.MULTILINE))
    for text in COMMAND.findall(page.PAGES[0].read_text()):
        program, *words = shlex.split(text)
        if program == "relax-npu":
            if len(words) == 1:  # a mention
                with pytest.raises(SystemExit, match="0"):
                    _parser().parse_args([*words, "--help"])
            else:
                _parser().parse_args(words)
        elif program == "nox":
            assert words[0] == "-s"
            assert words[1] in sessions, text
        else:
            options, settings = parse_options(words)
            assert options.recipe
            assert all(re.fullmatch(r"--[a-z_]+\.[a-z_]+", name) for name in settings[::2]), text


REPORTS = {
    1: "Relax#288", 5: "Relax#63", 6: "sglang#34495", 7: "miles#1926", 8: "vime#274", 9: "verl#6580",
    10: "ms-swift#7036", 11: "twinkle#102", 12: "vime#285", 13: "sglang#15246", 14: "sglang#40419",
    15: "sglang#32990", 16: "sglang#33515", 17: "vllm-ascend#9290", 18: "slime#1686", 19: "ms-swift#7299",
    20: "ms-swift#9814", 21: "ms-swift#9624", 22: "ms-swift#8121", 23: "ms-swift#9791",
    24: "Megatron-LM#4495", 25: "verl#6432", 26: "vllm-ascend#10956", 27: "vllm-ascend#15503",
    28: "ms-swift#9621", 29: "sgl-kernel-npu#477", 30: "flash-linear-attention-npu#149", 31: "MindSpeed-Ops",
    33: "Trinity-RFT#618", 34: "ROLL#421",
}  # fmt: skip
"""A public report of each case of the field; 2 to 4, 35, 36 are of the review of 1, 32 in the row of 22."""
SHARED = 7


def test_each_reported_case_has_a_row(page: ModuleType) -> None:
    for path in page.PAGES:
        text = path.read_text()
        missing = [case for case, report in REPORTS.items() if report not in text]
        assert not missing, path.name
        assert sum("| Relax#288 |" in line for line in text.splitlines()) >= SHARED


def test_the_translation_names_the_same_reports_row_by_row(page: ModuleType) -> None:
    english, chinese = (
        [line.split(" | ")[-1] for line in path.read_text().splitlines() if line.startswith("|")]
        for path in page.PAGES
    )
    reports = [cell for cell in english if "#" in cell]
    assert reports == [cell for cell in chinese if "#" in cell]
    assert len(reports) > 25


def test_every_operator_of_relax_kernels_is_in_the_table() -> None:
    from relax_kernels.explanation import CALLS

    assert set(CALLS) == {c.operator for c in CAPABILITIES} | set(BY_TORCH)
