"""Checkpoints of Megatron's distributed optimizer on torch's Adam."""

from contextlib import ExitStack

import pytest
import torch
from relax_core.model import Qwen35Config, build_model
from relax_core.packing import PackedLayout
from relax_core.upstream.distributed_optimizer import FRESH_STATE, GROUP_ORDER, OWN_STEP, SEPARATE_STEPS

FORMAT = {"distrib_optim_sharding_type": "fully_reshardable"}
LAYOUT = PackedLayout.build((9, 5))


class Run:
    """A model in training, enough to take steps and to save and load."""

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

    def sharded(self, *, is_loading: bool) -> dict:
        model = self.model.sharded_state_dict()
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=FORMAT)
        return {"model": model, "optimizer": optimizer}

    def save(self, directory) -> None:
        from megatron.core import dist_checkpointing

        dist_checkpointing.save(self.sharded(is_loading=False), str(directory))

    def load(self, directory) -> None:
        from megatron.core import dist_checkpointing

        content = dist_checkpointing.load(self.sharded(is_loading=True), str(directory))
        self.model.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])

    def weights(self) -> dict:
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}


@pytest.fixture
def config(config_of):
    return config_of(
        num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], mtp_num_hidden_layers=1
    )


def test_a_fresh_optimizer_can_be_asked_for_its_state(cpu_world, config):
    run = Run(config, torch.float32)
    with FRESH_STATE.suspended(), pytest.raises(AssertionError):
        run.sharded(is_loading=True)
    run.sharded(is_loading=True)
    steps = [group["step"] for group in run.optimizer.state_dict()["optimizer"]["param_groups"]]
    assert set(steps) == {0}


def test_a_sharded_checkpoint_loads(cpu_world, config, tmp_path):
    run = Run(config, torch.float32)
    run.step(0)
    run.save(tmp_path)
    with OWN_STEP.suspended(), pytest.raises(KeyError, match="step"):
        Run(config, torch.float32).load(tmp_path)
    Run(config, torch.float32).load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("corrected", [True, False], ids=["corrected", "as upstream"])
def test_training_goes_on_after_loading_as_if_uninterrupted(cpu_world, config, tmp_path, dtype, corrected):
    run = Run(config, dtype)
    for seed in range(2):
        run.step(seed)
    run.save(tmp_path)
    with ExitStack() as stack:
        if not corrected:
            stack.enter_context(SEPARATE_STEPS.suspended())
        resumed = Run(config, dtype)
        resumed.load(tmp_path)
        assert all(
            torch.equal(a, b) for a, b in zip(run.weights().values(), resumed.weights().values(), strict=True)
        )
        for seed in range(2, 5):
            run.step(seed)
            resumed.step(seed)
    equal = {name: torch.equal(value, resumed.weights()[name]) for name, value in run.weights().items()}
    assert all(equal.values()) is corrected, equal


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
