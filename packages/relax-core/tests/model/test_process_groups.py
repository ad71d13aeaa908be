"""The groups that the modules of a model hold."""

import pytest
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from relax_core.model import Qwen35Config, build_model

_ALIASES = {
    "tp_group": "tp", "_tp_group": "tp", "heads_over": "tp", "pp_group": "pp", "cp_group": "cp",
    "embd_group": "embd",
}  # fmt: skip


def held_groups(model):
    """(module and attribute, name of the group, group) of every process group in a model."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            many = vars(value) if isinstance(value, ProcessGroupCollection) else {name: value}
            for last, group in many.items():
                if isinstance(group, dist.ProcessGroup):
                    yield f"{path}.{name}", _ALIASES.get(last, last), group


@pytest.mark.usefixtures("cpu_world")
def test_every_group_of_a_model_is_the_one_that_a_forgotten_argument_means(moe_config_of):
    held = list(held_groups(build_model(Qwen35Config.from_hf(moe_config_of(mtp_num_hidden_layers=1)))))
    places = {place for place, _name, _group in held}
    wanted = ("in_proj", "linear_qkv", "word_embeddings", "output_layer", "mtp.layers", "experts")
    assert [part for part in wanted if not any(part in place for place in places)] == []
    meant = vars(ProcessGroupCollection.use_mpu_process_groups())
    others = {(place, name) for place, name, group in held if group is not meant.get(name)}
    assert others == set()
