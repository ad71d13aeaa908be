"""Settings of sampling that exclude one another."""

import pytest
from relax_core.loop.config import RolloutConfig


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"urls": ("a:1", "http://b", "ftp://c")}, r"urls has 'a:1', 'ftp://c': give http://host:port"),
        ({"urls": ("http://a",), "servers": 2}, "servers is 2 and urls names 1 that run already"),
        ({"partial_versions": 5}, "partial_versions is 5 and early_abort off: only with continue"),
    ],
)
def test_what_would_be_ignored_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        RolloutConfig(engine="sglang", **settings)


@pytest.mark.parametrize("setting", [{"servers": 2}, {"urls": ("http://a",)}, {"draft_tokens": 1}])
def test_what_belongs_to_servers_is_refused_by_the_embedded_engine(setting):
    with pytest.raises(ValueError, match=f"{next(iter(setting))} cannot be used by the engine transformers"):
        RolloutConfig(**setting)
    assert RolloutConfig(engine="sglang", **setting).engine == "sglang"
