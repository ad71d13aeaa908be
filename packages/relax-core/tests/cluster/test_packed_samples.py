"""Samples that travel come back as they were."""

import pickle

import torch
from relax_core.cluster.packed_samples import PackedSamples
from relax_core.trainer.sample import Sample


def test_samples_come_back_with_their_bits():
    def sample(length, group):
        mask_L = torch.cat([torch.zeros(1), torch.ones(length - 1)])
        columns = {"advantage": torch.randn(length), "rollout_logprob": -torch.rand(length)}
        return Sample(torch.randint(0, 99, (length,)), mask_L, group, columns)

    samples = [sample(5, 0), sample(1, 0), sample(9, 7)]
    back = pickle.loads(pickle.dumps(PackedSamples.pack(samples))).unpack()
    for one, other in zip(samples, back, strict=True):
        assert one.group == other.group
        assert torch.equal(one.tokens_L, other.tokens_L)
        assert torch.equal(one.mask_L, other.mask_L)
        assert one.columns.keys() == other.columns.keys()
        assert all(torch.equal(one.columns[name], other.columns[name]) for name in one.columns)
