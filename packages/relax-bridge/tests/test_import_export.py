import pytest
import torch
from relax_bridge import Checkpoint, CoverageError, model_map, write_checkpoint


def test_a_round_trip_returns_the_very_bytes(tiny: Checkpoint, tmp_path):
    the_map = model_map(tiny.config)
    there = dict(the_map.import_tensors(tiny))
    out = write_checkpoint(tmp_path / "out", the_map.export_tensors(there), like=tiny)
    again = Checkpoint.open(out)
    assert again.names == tiny.names
    for file in tiny.files:
        assert (out / file).read_bytes() == (tiny.path / file).read_bytes()


def test_a_log_stays_float32_and_projections_bfloat16(tiny: Checkpoint):
    there = dict(model_map(tiny.config).import_tensors(tiny))
    assert there["decoder.layers.0.self_attention.A_log"].dtype == torch.float32
    assert there["decoder.layers.0.self_attention.in_proj.weight"].dtype == torch.bfloat16


def test_a_missing_megatron_tensor_is_named(tiny: Checkpoint):
    the_map = model_map(tiny.config)
    there = dict(the_map.import_tensors(tiny))
    del there["mtp.layers.0.eh_proj.weight"]
    with pytest.raises(CoverageError, match=r"1 missing:\n  mtp\.layers\.0\.eh_proj\.weight"):
        the_map.export_tensors(there)
