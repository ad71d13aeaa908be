"""Settings of sampling that exclude one another."""

import pytest
from relax_core.loop.config import RolloutConfig


@pytest.mark.parametrize("setting", [{"servers": 2}, {"urls": ("http://a",)}, {"draft_tokens": 1}])
def test_what_belongs_to_servers_is_refused_by_the_embedded_engine(setting):
    with pytest.raises(ValueError, match=f"{next(iter(setting))} cannot be used by the engine transformers"):
        RolloutConfig(**setting)
    assert RolloutConfig(engine="sglang", **setting).engine == "sglang"
