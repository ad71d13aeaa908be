import pytest
from relax_core.config import ConfigError, load_config
from relax_core.recipes import builtin_recipes, read_recipe


@pytest.mark.parametrize("name", builtin_recipes())
def test_every_recipe_that_ships_is_valid(name):
    load_config(name)


def test_a_recipe_extends_another_by_name_or_relative_path(tmp_path):
    (tmp_path / "base.yaml").write_text("extends: quickstart\nrun:\n  seed: 5\n  steps: 6\n")
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "top.yaml").write_text("extends: ../base.yaml\nrun:\n  steps: 7\n")
    layer = read_recipe(str(folder / "top.yaml"))
    assert layer.problems == []
    assert layer.values["run"]["seed"] == 5
    assert layer.values["run"]["steps"] == 7
    assert layer.values["rollout"] == read_recipe("quickstart").values["rollout"]
    assert layer.origins["run", "steps"] == "top.yaml, line 3"
    assert layer.origins["run", "seed"] == "base.yaml, line 3"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("extends: me.yaml\n", "no such recipe file"),
        ("extends: self.yaml\n", "the recipe extends itself: self.yaml -> self.yaml"),
        ("extends: [a]\n", "must be one recipe's name or path"),
        ("extends: quikstart\n", "there is no recipe of that name"),
        ("run: [\n", "the recipe cannot be read: line 2"),
    ],
)
def test_what_cannot_be_extended_is_a_problem(tmp_path, content, words):
    (tmp_path / "self.yaml").write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_config(str(tmp_path / "self.yaml"), ["--run.steps", "0"])
    assert words in str(caught.value)
    assert "run.steps" in str(caught.value), "flags are checked all the same"


def test_an_unknown_recipe_names_the_nearest_and_all():
    (problem,) = read_recipe("quikstart").problems
    assert problem.nearest == "quickstart"
    assert "quickstart-sft" in problem.allowed


def test_a_recipe_that_is_not_text_is_a_problem(tmp_path):
    (tmp_path / "bad.yaml").write_bytes(b"run: \xff\xfe\n")
    (problem,) = read_recipe(str(tmp_path / "bad.yaml")).problems
    assert "cannot be read" in problem.message
