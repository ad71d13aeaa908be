"""Samples that travel come back as they were."""

import pickle
from dataclasses import replace

import numpy as np
import torch
from relax_core.cluster.packed_samples import PackedSamples
from relax_core.trainer.sample import Sample
from relax_rollout.pictures import Picture, PlacedPicture


def test_samples_come_back_with_their_bits():
    def sample(length, group):
        mask_L = torch.cat([torch.zeros(1), torch.ones(length - 1)])
        columns = {"advantage": torch.randn(length), "rollout_logprob": -torch.rand(length)}
        return Sample(torch.randint(0, 99, (length,)), mask_L, group, columns)

    picture = Picture(
        (1, 2, 4), 2, np.arange(96, dtype=np.uint8).reshape(8, 3, 1, 4), np.ones((3, 96), np.float32), 2
    )
    placed = (PlacedPicture(picture, 1), PlacedPicture(picture, 5))
    samples = [sample(5, 0), sample(1, 0), replace(sample(9, 7), pictures=placed)]
    back = pickle.loads(pickle.dumps(PackedSamples.pack(samples))).unpack()
    for one, other in zip(samples, back, strict=True):
        assert one.group == other.group
        assert torch.equal(one.tokens_L, other.tokens_L)
        assert torch.equal(one.mask_L, other.mask_L)
        assert [p.start for p in one.pictures] == [p.start for p in other.pictures]
        assert [p.picture.digest() for p in one.pictures] == [p.picture.digest() for p in other.pictures]
        assert one.columns.keys() == other.columns.keys()
        assert all(torch.equal(one.columns[name], other.columns[name]) for name in one.columns)
