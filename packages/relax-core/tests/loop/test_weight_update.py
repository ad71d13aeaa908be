"""The engine's digests against those of what was sent."""

import asyncio

import pytest
from relax_bridge import Checkpoint
from relax_core.loop.weights import WeightMismatchError, retried, update_engine
from relax_rollout import TransferError, create_engine
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


class Losing:
    """An engine that loses the first tensor of its first updates on the way."""

    def __init__(self, times):
        self.times, self.began = times, 0

    async def begin_update(self, version, kept):
        self.began += 1
        return {}

    async def load(self, bucket):
        if self.began <= self.times:
            raise TransferError("lost")

    async def end_update(self):
        return {}


def test_tensors_lost_on_their_way_are_sent_again_and_every_rank_comes_to_the_end_of_them(sent):
    gathered = []

    def tensors():
        for name, tensor in sent.items():
            yield name, tensor
            gathered.append(name)

    async def go(engine):
        return await retried(lambda: update_engine(engine, tensors(), 1, bucket_bytes=1), 1)

    assert asyncio.run(go(Losing(2))) == 0
    # The other ranks of a model took part in all three.
    assert gathered == 3 * list(sent)
    with pytest.raises(TransferError):
        asyncio.run(go(Losing(3)))
