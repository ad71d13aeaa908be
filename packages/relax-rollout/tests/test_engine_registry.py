"""Engines are found by name."""

import subprocess
import sys

import pytest
from relax_rollout import available_engines, create_engine


def test_the_embedded_engine_is_installed():
    assert "transformers" in available_engines()


def test_an_unknown_engine_is_refused_with_the_installed_ones():
    with pytest.raises(ValueError, match=r"no engine is called 'vllm'; installed are: .*transformers"):
        create_engine("vllm")


def test_rewards_and_requests_do_not_import_torch():
    code = (
        "import sys, relax_rollout, relax_rollout.rewards, relax_rollout.filters; "
        "sys.exit('torch' in sys.modules or 'sympy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
