"""Bytes of weights, gradients and optimizer in the plan, against a trainer's that took a step on a CPU,
with a vision tower, adapters or a critic."""

import numpy as np
import pytest
import torch
from relax_core.algorithms import AlgorithmConfig
from relax_core.device.parallel import ParallelConfig
from relax_core.loop.objectives import SftObjective
from relax_core.model import MtpConfig, Qwen35Config
from relax_core.model.build import build_chunks, freeze_tower
from relax_core.model.lora_config import LINEAR, LoraConfig
from relax_core.plan.local import Local
from relax_core.plan.tape import measure
from relax_core.plan.trainer_memory import Beside, rank_memory, stages
from relax_core.plan.vision import Sight
from relax_core.testing.colours import model_config
from relax_core.trainer.config import TrainerConfig
from relax_core.trainer.sample import Sample
from relax_core.trainer.trainer import Trainer
from relax_rollout.pictures import Picture, PlacedPicture

CPU = torch.device("cpu")
BYTES = ("weights", "gradients", "optimizer")


def model_of(*, experts: bool = False, tied: bool = False) -> Qwen35Config:
    facts = model_config() | {"tie_word_embeddings": tied}
    if experts:
        text = {key: value for key, value in facts["text_config"].items() if key != "intermediate_size"}
        moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        facts |= {
            "model_type": "qwen3_5_moe",
            "text_config": {
                **text, **moe, "model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 40
            },
        }  # fmt: skip
    return Qwen35Config.from_hf(facts, vision=True)


def built(model, config: TrainerConfig, *, vision: str, lora=None, critic=False) -> dict[str, int]:
    """What a trainer holds after one step on a sample with a picture."""
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    mtp = MtpConfig(loss_coefficient=0.0 if lora else 0.1)
    chunks = build_chunks(model, mtp=mtp, dtype=dtype, lora=lora, critic=critic)
    if vision == "frozen":
        freeze_tower(chunks)
    trainer = Trainer(chunks, config, mtp, device=CPU, optimizer_steps=2)
    patches = np.random.default_rng(0).normal(size=(8, 96)).astype(np.float32)
    picture = PlacedPicture(Picture.of(patches, (1, 2, 4), merge=2, channels=3, frames=2), 1)
    mask_L = torch.tensor([0.0, 0, 0, 0, 1, 1, 1, 1])
    trainer.step([Sample(torch.arange(8), mask_L, pictures=(picture,))], SftObjective(AlgorithmConfig()))
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    states = [state for adam in trainer.training.adams for state in adam.state.values()]
    # A float32 weight is its own master.
    kept = [v for state in states for v in state.values() if v.untyped_storage().data_ptr() not in own]
    return {
        "weights": sum(parameter.nbytes for parameter in parameters),
        "gradients": sum(p.main_grad.nbytes for p in parameters if getattr(p, "main_grad", None) is not None),
        "optimizer": sum(value.nbytes for value in kept),
    }


def planned(model, config: TrainerConfig, *, vision: str, lora=None, beside=()):
    local = Local.of(model, ParallelConfig(), tokens=8, activation=2)
    (stage,) = stages(local, recompute="none", mtp=MtpConfig(), lora=lora)
    options = {"data": 1, "expert_data": 1, "micro_batches": 1, "tower": vision == "trained"}
    return rank_memory(stage, 0, config, **options, beside=beside)


LORA = LoraConfig(rank=4)
EXPERTS_TOO = LoraConfig(rank=2, targets=(*LINEAR, "experts"))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("sizes", "vision", "lora"),
    [
        ({}, "trained", None),
        ({"tied": True}, "frozen", None),
        ({"experts": True}, "trained", None),
        ({}, "frozen", LORA),
        ({"experts": True}, "frozen", EXPERTS_TOO),
    ],
    ids=["trained tower", "frozen tower", "experts", "adapters", "adapters of experts"],
)
def test_the_bytes_are_those_of_a_trainer_that_took_a_step(cpu_world, sizes, vision, lora, precision):
    model, config = model_of(**sizes), TrainerConfig(precision=precision, lr=1e-3)
    memory = planned(model, config, vision=vision, lora=lora)
    counted = {kind: sum(getattr(memory, kind).values()) for kind in BYTES}
    assert counted == built(model, config, vision=vision, lora=lora)
    assert ("vision tower" in memory.gradients) == (vision == "trained")
    assert memory.weights["vision tower"] > 0
    if lora is not None:
        assert set(memory.gradients) == set(memory.optimizer) == {"adapters"}


@pytest.mark.parametrize("vision", ["frozen", "trained"])
def test_a_critic_takes_what_its_trainer_holds_and_a_teacher_its_weights(cpu_world, vision):
    model, config = model_of(), TrainerConfig(precision="bf16", lr=1e-3)
    teacher = model_of(experts=True)
    memory = planned(
        model,
        config,
        vision=vision,
        beside=(Beside("critic", model, trained=True), Beside("teacher", teacher)),
    )
    assert memory.beside["critic"] == sum(built(model, config, vision=vision, critic=True).values())
    chunks = build_chunks(teacher, dtype=torch.bfloat16)
    assert memory.beside["teacher"] == sum(p.nbytes for chunk in chunks for p in chunk.parameters())
    alone = planned(model, config, vision=vision)
    assert memory.peak - alone.peak == sum(memory.beside.values()) == memory.static - alone.static


def kept_by(tower, patches_PF, grids) -> int:
    """Bytes that autograd keeps of a forward pass, weights aside."""
    own = {parameter.untyped_storage().data_ptr() for parameter in tower.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        tower(patches_PF, grids)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_the_towers_activations_are_those_that_autograd_keeps(cpu_world):
    """With every block computed again: inside blocks a GPU's attention keeps other things than a CPU's."""
    model = model_of()
    (chunk,) = build_chunks(model, dtype=torch.bfloat16, recompute="full")
    patches = torch.randn(256, 96)
    local = Local.of(model, ParallelConfig(), tokens=300, activation=2)

    def planned_activations(trained: bool) -> int:
        sight = Sight(model.vision, 256, 256, trained)
        (stage,) = stages(local, recompute="full", mtp=MtpConfig(), sight=sight)
        return measure(stage.tape()).by_part["vision tower"]

    numbers = patches.nbytes
    assert planned_activations(trained=False) == numbers
    built_bytes = kept_by(chunk.train().visual, patches, ((1, 16, 16),))
    assert built_bytes + numbers == pytest.approx(planned_activations(trained=True), rel=0.01)
