"""What holds for every file and every package of the repository."""

import re
import tomllib
from pathlib import Path

import pytest

# Put together from pieces, so that this file does not hold what it forbids.
HOSTS = [
    ".".join(parts)
    for parts in (("pypi", "org"), ("python" + "hosted", "org"), ("deb", "debian"), ("npmjs", "org"))
]
SITE = re.compile("|".join(re.escape(host) for host in HOSTS) + "|mirrors" + r"\.[a-z]+\.")
MACHINE_PATH = re.compile(
    r"(?<![\w.$}*-])/(?:" + "|".join(("root", "work", r"home/\w+", r"Users/\w+")) + ")/"
)
SECRET = re.compile(
    "|".join(
        (
            "hf" + r"_[A-Za-z]{30,}",
            "gh" + r"p_\w{30,}",
            "AK" + "IA[A-Z0-9]{16}",
            "BEGIN [A-Z ]*PRIV" + "ATE KEY",
        )
    )
)
MOST_LINES = 800
NOT_SOURCE = {"LICENSE"}
PACKAGES = ("relax-bridge", "relax-core", "relax-kernels", "relax-npu", "relax-rollout")


def text_of(path: Path) -> str | None:
    """The text of a file, or None for a binary one."""
    content = path.read_bytes()
    return None if b"\0" in content else content.decode(errors="replace")


@pytest.mark.parametrize(
    ("pattern", "what"),
    [(SITE, "a package index host"), (MACHINE_PATH, "an absolute path of one machine"), (SECRET, "a secret")],
    ids=["index host", "machine path", "secret"],
)
def test_no_tracked_file_names(pattern: re.Pattern[str], what: str, root: Path, tracked: list[Path]) -> None:
    found = [
        f"{path}: {match.group(0)}"
        for path in tracked
        if (text := text_of(root / path)) is not None and (match := pattern.search(text))
    ]
    assert not found, f"{what} in {found}"


def test_the_patterns_find_what_they_are_for() -> None:
    assert SITE.search(f"url = https://{HOSTS[0]}/simple")
    assert SITE.search("https://mirrors" + ".site.example/simple")
    assert MACHINE_PATH.search("cd /" + "root/x")
    assert MACHINE_PATH.search('"/' + 'home/me/x"')
    assert not MACHINE_PATH.search("https://example.org/work/x")
    assert not MACHINE_PATH.search("frame/work/x")


def test_the_lock_file_of_uv_is_not_tracked(tracked: list[Path]) -> None:
    assert not [path for path in tracked if path.name == "uv.lock"]


def test_no_source_file_is_long(root: Path, tracked: list[Path]) -> None:
    python = [path for path in tracked if path.suffix in {".py", ".md", ".toml", ".yaml", ".sh"}]
    assert python
    lengths = {str(path): len((root / path).read_text().splitlines()) for path in python}
    assert not {name: n for name, n in lengths.items() if n >= MOST_LINES}


def test_test_files_have_names_of_their_own(tracked: list[Path]) -> None:
    names = [path.name for path in tracked if path.name.startswith("test_")]
    assert not {name for name in names if names.count(name) > 1}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_complete(package: str, root: Path, tracked: list[Path]) -> None:
    folder = Path("packages") / package
    module = package.replace("-", "_")
    wanted = [
        "pyproject.toml",
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
        f"src/{module}/__init__.py",
        f"src/{module}/py.typed",
    ]
    assert not [name for name in wanted if folder / name not in tracked]
    assert any(path.is_relative_to(folder / "tests") and path.name.startswith("test_") for path in tracked)
    project = tomllib.loads((root / folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == package
    assert project["version"] == "0.1.0"
    assert project["requires-python"] == ">=3.11,<3.13"
    assert project["license-files"] == ["LICENSE"]
    assert (root / folder / "LICENSE").read_bytes() == (root / "LICENSE").read_bytes()
    assert project["version"] in (root / folder / "CHANGELOG.md").read_text()
    readme = (root / folder / "README.md").read_text()
    assert readme.startswith(f"# {package}\n")
    assert "```" in readme, "no example"


def test_there_is_no_package_that_the_tests_do_not_know(root: Path) -> None:
    assert sorted(path.parent.name for path in (root / "packages").glob("*/pyproject.toml")) == sorted(
        PACKAGES
    )
