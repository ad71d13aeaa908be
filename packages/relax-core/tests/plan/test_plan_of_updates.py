"""What an update takes beside the weights, against what the sender packs, and the phases it is part of."""

import pytest
import torch
from relax_bridge import Layout, Placement, export_shards, model_map
from relax_core.config import load_config
from relax_core.loop.weights import BUCKET_BYTES
from relax_core.model import Qwen35Config
from relax_core.plan.update_memory import BUCKET, update_memory
from relax_rollout.weights.ipc import IpcSender

ONE = "qwen35-9b-mtp-1xcuda"
HEADS = [(4, 2), (2, 1), (1, 1)]


@pytest.fixture
def packed():
    """Bytes of tensors that the sender copies, and does not give out where they are."""

    def count(tensors, lent) -> int:
        placed = IpcSender(lent).place(dict(tensors))
        own = {tensor.data_ptr() for tensor in lent}
        return sum(e.nbytes for entries, memory in placed for e in entries if memory.data_ptr() not in own)

    return count


def held(shapes):
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}


@pytest.mark.parametrize(("query", "kv"), HEADS)
@pytest.mark.parametrize("mtp", [0, 1])
def test_one_rank_packs_what_it_holds_in_another_order(config_of, packed, query, kv, mtp):
    facts = config_of(num_attention_heads=query, num_key_value_heads=kv, mtp_num_hidden_layers=mtp)
    table = model_map(facts)
    own = held(table.megatron_shapes())
    found = update_memory(load_config(ONE), Qwen35Config.from_hf(facts))
    assert (found.packed, found.staged) == (packed(table.export_tensors(own), list(own.values())), 0)


def test_experts_are_stacked_anew(moe_config_of, packed):
    facts = moe_config_of(mtp_num_hidden_layers=1)
    table = model_map(facts)
    own = held(table.megatron_shapes())
    found = update_memory(load_config(ONE), Qwen35Config.from_hf(facts))
    stacked = [name for name in table.hf_shapes() if name.endswith("experts.gate_up_proj")]
    assert found.packed == packed(table.export_tensors(own), list(own.values())), stacked


@pytest.mark.parametrize(("query", "kv"), [(8, 4), (4, 2)])
def test_servers_that_cut_as_the_trainer_does_have_shares_packed_and_an_input_projection_whole(
    config_of, packed, query, kv
):
    facts = config_of(num_attention_heads=query, num_key_value_heads=kv, mtp_num_hidden_layers=1)
    table, layout = model_map(facts), Layout(tensor=2)
    own = held({s.entry.megatron: s.shape for s in Placement(table, layout).shards(0)})
    shares = export_shards(table, own, layout=layout, rank=0, engine=layout)
    apart = packed(((share.name, share.tensor) for share in shares), list(own.values()))
    config = load_config("qwen35-9b-mtp-2xcuda", ["--sglang.tensor", "2", "--cluster.engines", "1"])
    whole = 2 * 32 * 32 * 2
    assert update_memory(config, Qwen35Config.from_hf(facts)).packed == apart + whole


def test_the_bucket_is_that_of_a_run():
    assert BUCKET == BUCKET_BYTES
