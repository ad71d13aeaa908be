"""The pre-commit hooks are those of `nox -s lint`, one for one."""

import ast
from pathlib import Path

import yaml


def hooks_of_lint(root: Path) -> list[str]:
    for node in ast.parse((root / "noxfile.py").read_text()).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "HOOKS" and node.value:
            return list(ast.literal_eval(node.value))
    raise AssertionError("noxfile.py has no HOOKS")


def test_each_hook_of_lint_is_a_pre_commit_hook(root: Path) -> None:
    config = yaml.safe_load((root / ".pre-commit-config.yaml").read_text())
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    hooks = {hook["id"]: hook["entry"] for hook in config["repos"][0]["hooks"]}
    assert hooks == {name: f"uvx nox -R -s lint -- {name}" for name in hooks_of_lint(root)}
