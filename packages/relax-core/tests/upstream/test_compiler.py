"""torch's compiler is loaded by those who compile, and by nobody else."""

import subprocess
import sys

import pytest


def run(code):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


STEP = """
import relax_core.upstream, sys, torch
from torch.utils.checkpoint import checkpoint
weight = torch.ones(2, requires_grad=True)
optimizer = torch.optim.AdamW([weight], lr=0.5)
checkpoint(torch.exp, weight, use_reentrant=False).sum().backward()
optimizer.step()
print('torch._dynamo' in sys.modules, bool((weight < 0.6).all()))
"""


def test_an_optimizer_step_loads_no_compiler():
    assert run(STEP) == ["False", "True"]


COMPILED = """
double = torch.compile(lambda x: torch._disable_dynamo(lambda y: y * 2)(x) + 1, backend='eager')
print('torch._dynamo' in sys.modules, double(torch.ones(1)).item())
optimizer.zero_grad()
print(weight.grad is None)
"""


def test_who_compiles_has_the_compiler_still():
    assert run(STEP + COMPILED)[2:] == ["True", "3.0", "True"]


def test_a_tokenizer_and_a_model_load_no_compiler():
    code = """
import relax_core.upstream, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.integrations import deepgemm
from transformers.masking_utils import TransformGetItemToIndex
print('torch._dynamo' in sys.modules, [m for m in sys.modules if m.startswith('torch._dynamo')])
import torch
x = torch.arange(3.0)
def pick(i):
    return x[i]
with TransformGetItemToIndex():
    print(torch.vmap(pick)(torch.tensor([2, 0])).tolist())
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex as torchs
print(type(TransformGetItemToIndex()) is torchs)
print(torch._dynamo.trace_rules.is_callable_allowed(deepgemm._populate_deepgemm_kernel))
"""
    assert run(code) == ["False", "[]", "[2.0,", "0.0]", "True", "True"]


@pytest.mark.parametrize("first", ["torch", "torch._dynamo"])
def test_it_does_no_harm_where_torch_was_first(first):
    code = f"import {first}, relax_core.upstream\nfrom transformers import masking_utils\nprint('fine')"
    assert run(code) == ["fine"]
