"""Which state Megatron's distributed optimizer finds for a parameter."""

import pytest
import torch
from relax_core.model import Qwen35Config, build_model
from relax_core.packing import PackedLayout
from relax_core.upstream.distributed_optimizer import GROUP_ORDER

LAYOUT = PackedLayout.build((9, 5))


class Run:
    """A model in training, enough to take steps."""

    def __init__(self, config: dict, dtype: torch.dtype) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        torch.manual_seed(0)
        self.model = build_model(Qwen35Config.from_hf(config), dtype=dtype)
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        self.wrapped = DistributedDataParallel(self.model.config, ddp, self.model)
        settings = OptimizerConfig(
            lr=0.01, weight_decay=0.1, clip_grad=1.0, bf16=dtype is torch.bfloat16, params_dtype=dtype,
            use_distributed_optimizer=True,
        )  # fmt: skip
        self.optimizer = get_megatron_optimizer(settings, [self.wrapped])

    def step(self, seed: int) -> None:
        tokens = torch.randint(0, 96, (LAYOUT.total,), generator=torch.Generator().manual_seed(seed))
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        target = torch.where(LAYOUT.ahead(1)[1], LAYOUT.shift(tokens, 1), -1)
        (-self.model.token_logprobs(self.wrapped(tokens, LAYOUT), target).logprob_T.mean()).backward()
        self.wrapped.finish_grad_sync()
        assert self.optimizer.step()[0]


@pytest.fixture
def config(config_of):
    return config_of(
        num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], mtp_num_hidden_layers=1
    )


def test_each_parameter_finds_its_own_state_among_two_dtypes(cpu_world, config):
    def misplaced(run: Run) -> list[str]:
        """Parameters whose main copy, rounded to their dtype, is not what they hold."""
        inner = getattr(run.optimizer, "chained_optimizers", [run.optimizer])[0]
        found = []
        for name, parameter in run.model.named_parameters():
            main = inner._get_main_param_and_optimizer_states(parameter)["param"]
            if not torch.equal(main.to(parameter.dtype), parameter.flatten()):
                found.append(name)
        return found

    with GROUP_ORDER.suspended():
        faulty = Run(config, torch.bfloat16)
    faulty.step(0)
    right = Run(config, torch.bfloat16)
    right.step(0)
    assert {p.dtype for p in right.model.parameters()} == {torch.float32, torch.bfloat16}
    assert misplaced(faulty)
    assert not misplaced(right)
