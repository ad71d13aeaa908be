"""The engine's digests against those of what was sent."""

import asyncio

import pytest
from relax_bridge import Checkpoint
from relax_core.loop.weights import WeightMismatchError, update_engine
from relax_rollout import create_engine
from relax_rollout.engines.transformers.weights import WeightUpdate


@pytest.fixture(scope="module")
def sent(small_model):
    checkpoint = Checkpoint.open(small_model)
    return {name: checkpoint.tensor(name) for name in checkpoint.names}


def update(model, dtype, tensors, *, bucket_bytes):
    async def go():
        engine = create_engine("transformers", model=model, dtype=dtype)
        try:
            return await update_engine(engine, tensors.items(), 3, bucket_bytes=bucket_bytes)
        finally:
            await engine.close()

    return asyncio.run(go())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bucket_bytes", [1, 2**30])
def test_every_weight_that_is_served_is_compared_in_the_dtype_it_is_served_in(
    small_model, sent, dtype, bucket_bytes
):
    # The checkpoint stores A_log and dt_bias in float32, and a bfloat16 engine goes on serving them so.
    trained = {name: tensor + 1e-3 for name, tensor in sent.items()}
    served = [name for name in sent if not name.startswith("mtp.")]
    assert update(small_model, dtype, trained, bucket_bytes=bucket_bytes) == len(served)


def test_another_value_in_one_weight_is_reported_by_its_name(small_model, sent, monkeypatch):
    commit = WeightUpdate.commit

    def flawed(self):
        digests = commit(self)
        return digests | {"model.norm.weight": digests["lm_head.weight"]}

    monkeypatch.setattr(WeightUpdate, "commit", flawed)
    with pytest.raises(WeightMismatchError, match=r"1 of \d+ tensors: model.norm.weight$"):
        update(small_model, "float32", sent, bucket_bytes=2**20)


def test_a_weight_that_the_engine_did_not_announce_is_a_mismatch(small_model, sent, monkeypatch):
    dtypes = WeightUpdate.dtypes
    monkeypatch.setattr(
        WeightUpdate, "dtypes", lambda self: {n: d for n, d in dtypes(self).items() if n != "lm_head.weight"}
    )
    with pytest.raises(WeightMismatchError, match=r"lm_head.weight$"):
        update(small_model, "float32", sent, bucket_bytes=2**20)
