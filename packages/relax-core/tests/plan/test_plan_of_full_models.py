"""Bytes of a rank in the plan, against the rank itself: published models in full, trainable as in a run, with
tensors that have shapes and no memory."""

import pytest
import torch
import torch.distributed as dist
from relax_core.device import ParallelConfig, get_device, initialise, shutdown
from relax_core.model import MtpConfig, Qwen35Config
from relax_core.model.build import build_chunks, freeze_tower
from relax_core.plan import DEVICES, plan_trainer
from relax_core.plan.shapes import published
from relax_core.trainer.config import TrainerConfig
from relax_core.trainer.optimizer import make_trainable
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

SP = {"tensor": 4, "sequence": True}
MOE = {**SP, "expert": 8, "expert_tensor": 1}
HALF = {"gradient_precision": "bf16", "moment_precision": "bf16"}
LAYOUTS = [
    ("Qwen3.5-2B", 1, 0, {}, {}, "trained"),
    ("Qwen3.5-4B", 2, 1, {"context": 2}, HALF, "absent"),
    ("Qwen3.5-9B", 8, 3, SP, {}, "frozen"),
    ("Qwen3.5-9B", 8, 7, {"tensor": 2, "sequence": True, "pipeline": 2}, {}, "absent"),
    ("Qwen3.5-9B", 4, 1, {"pipeline": 2, "pipeline_chunks": 2}, {}, "absent"),
    ("Qwen3.5-35B-A3B", 16, 9, {**MOE, "pipeline": 2}, HALF, "absent"),
    ("Qwen3.5-35B-A3B", 32, 0, {**MOE, "tensor": 8, "pipeline": 2, "expert": 16}, HALF, "absent"),
]  # fmt: skip


@pytest.fixture
def rank_of(monkeypatch):
    """Makes this process one rank of many: collectives return at once, and leave what they were given."""
    plain = dist.new_group

    def settle(gathered, own, group=None):
        gathered[:] = [own] * len(gathered)

    monkeypatch.setattr(dist, "new_group", lambda *args, **more: plain(*args, **{**more, "backend": "fake"}))
    monkeypatch.setattr(dist, "all_gather_object", settle)
    device = get_device("cpu")
    monkeypatch.setattr(type(device), "collective_backend", "fake")

    def start(rank, size, parallel):
        for name, value in {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": 0}.items():
            monkeypatch.setenv(name, str(value))
        initialise(device, parallel, store=FakeStore())

    shutdown()
    yield start
    shutdown()


@pytest.mark.parametrize(("name", "ranks", "rank", "sizes", "numbers", "vision"), LAYOUTS, ids=str)
def test_a_rank_of_a_full_model_has_the_bytes_of_the_plan(rank_of, name, ranks, rank, sizes, numbers, vision):
    model = Qwen35Config.from_hf(published()[name], vision=vision != "absent")
    parallel, config = ParallelConfig(**sizes), TrainerConfig(precision="bf16", **numbers)
    rank_of(rank, ranks, parallel)
    with FakeTensorMode():
        chunks = build_chunks(model, parallel, dtype=torch.bfloat16, random_weights=False)
        if vision == "frozen":
            freeze_tower(chunks)
        training = make_trainable(chunks, config, optimizer_steps=10)
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    own = {p.untyped_storage()._cdata for p in parameters}
    states = [value for adam in training.adams for state in adam.state.values() for value in state.values()]
    built = {
        "weights": sum(p.nbytes for p in parameters),
        "gradients": sum(p.main_grad.nbytes for p in parameters if p.requires_grad),
        "optimizer": sum(value.nbytes for value in states if value.untyped_storage()._cdata not in own),
    }
    made = plan_trainer(model, parallel, config, MtpConfig(), DEVICES["h200"], ranks=ranks, lengths=(64,),
                        vision=vision)  # fmt: skip
    memory = made.memory[rank * parallel.pipeline // ranks]
    counted = {kind: sum(getattr(memory, kind).values()) for kind in built}
    assert {k: counted[k] for k in ("weights", "gradients")} == {
        k: built[k] for k in ("weights", "gradients")
    }
    # Ranks that share states have equal pieces of padded buffers: borders move by the padding, at most 128
    # numbers of up to 14 bytes in each of four buffers.
    assert counted["optimizer"] == pytest.approx(built["optimizer"], abs=4 * 128 * 14 if ranks > 1 else 0)
