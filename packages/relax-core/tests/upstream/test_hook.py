"""`on_import` visits modules that are loaded and modules that will be."""

import sys

import pytest
from relax_core.upstream import on_import


@pytest.fixture
def package(tmp_path, monkeypatch):
    root = tmp_path / "hooked_package"
    root.mkdir()
    (root / "__init__.py").write_text("")
    (root / "first.py").write_text("value = 1\n")
    (root / "second.py").write_text("from hooked_package.first import value\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "hooked_package"
    for name in [n for n in sys.modules if n.startswith("hooked_package")]:
        del sys.modules[name]


def test_loaded_and_later_modules_are_visited_before_their_importer_goes_on(package):
    import hooked_package.first as first

    seen = []
    on_import(package, lambda module: seen.append(module.__name__))
    on_import(f"{package}.first", lambda module: setattr(module, "value", module.value + 1))
    assert set(seen) == {package, f"{package}.first"}
    assert first.value == 2
    del sys.modules[f"{package}.first"]
    from hooked_package.second import value

    assert value == 2
    assert seen[-2:] == [f"{package}.first", f"{package}.second"]


def test_source_of_visited_modules_can_still_be_read(package):
    import inspect

    on_import(package, lambda module: None)
    import hooked_package.first as first

    assert inspect.getsource(first) == "value = 1\n"
