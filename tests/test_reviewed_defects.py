"""The seven findings of the public review of the reference system's NPU change, each a test of ours by name.

Each of these tests shows the old behaviour as wrong and then the right one.
"""

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest
from relax_bridge import model_map

PLUGINS = "packages/relax-npu/simulated_tests/test_sglang_plugins.py"
IMAGE = "packages/relax-npu/tests/test_image.py"
FINDINGS = {
    "1 the transposed convolution weight goes stale": (
        PLUGINS,
        "test_an_update_refills_the_transposed_convolution",
    ),
    "2 log-probs of token ids under a wrong name": (PLUGINS, "test_log_probs_of_token_ids_arrive"),
    "3 a second stream that is None": (PLUGINS, "test_a_block_without_a_second_stream_uses_one"),
    "4 an installation that asks": (IMAGE, "test_what_aborted_the_reference_systems_build_is_found"),
    "5 a key in what the shell shows": (IMAGE, "test_a_key_never_stands_in_what_a_shell_shows"),
    "6 the map of MTP layers knows layer 0 only": (
        "tests/test_reviewed_defects.py",
        "test_every_draft_layer_is_mapped",
    ),
    "7 the vocabulary searched twice": (PLUGINS, "test_the_vocabulary_is_searched_once"),
}


@pytest.mark.parametrize("finding", FINDINGS)
def test_a_finding_has_a_test(finding: str, root: Path) -> None:
    path, name = FINDINGS[finding]
    tree = ast.parse((root / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_every_draft_layer_is_mapped(layers: int) -> None:
    config = {
        "model_type": "qwen3_5_text",
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "full_attention_interval": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "tie_word_embeddings": False,
        "mtp_num_hidden_layers": layers,
    }
    table = model_map(config)

    def inside(names: Iterable[str], layer: str) -> set[str]:
        return {name.removeprefix(layer) for name in names if name.startswith(layer)}

    # A draft layer is one of full attention, with the names that the trunk's has, behind an entrance.
    ours = inside(table.megatron_shapes(), "decoder.layers.3.")
    theirs = inside(table.hf_shapes(), "model.layers.3.")
    assert (len(ours), len(theirs)) == (8, 11)
    for layer in range(layers):
        assert inside(table.megatron_shapes(), f"mtp.layers.{layer}.transformer_layer.") == ours
        assert inside(table.hf_shapes(), f"mtp.layers.{layer}.") >= theirs
        entrance = inside(table.megatron_shapes(), f"mtp.layers.{layer}.")
        assert entrance >= {"enorm.weight", "hnorm.weight", "eh_proj.weight", "final_layernorm.weight"}
