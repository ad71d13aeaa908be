"""Which weights the frozen reference of the KL has."""

import json
import shutil

import pytest
import torch
from relax_core.loop.session import open_session
from relax_core.trainer.sample import Sample

TOKENS_L = torch.tensor([5, 7, 11, 13, 17, 19, 23, 29])


def scores(session):
    """Log-probs of some tokens under the policy and under the reference."""
    sample = Sample(TOKENS_L, (torch.arange(len(TOKENS_L)) > 0).float())
    policy = session.policy
    return tuple(policy.trainer.score([sample], model=model)[0] for model in (None, policy.reference))


@pytest.mark.parametrize("random_weights", [False, True])
def test_without_a_path_it_is_the_policy_as_it_starts(small_run, small_model, random_weights):
    model = {"path": str(small_model), "random_weights": random_weights}
    with open_session(small_run(model=model, algorithm={"kl_loss_coef": 0.1})) as session:
        policy, reference = scores(session)
        assert torch.equal(policy, reference)
        mine, (frozen,) = session.policy.trainer.model, session.policy.reference
        assert not any(parameter.requires_grad for parameter in frozen.parameters())
        assert all(
            p.data_ptr() != q.data_ptr() for p, q in zip(mine.parameters(), frozen.parameters(), strict=True)
        )


def test_with_a_path_it_reads_that_checkpoints_own_config(small_run, small_model, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(small_model, other)
    config = json.loads((other / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 10.0
    (other / "config.json").write_text(json.dumps(config))
    with open_session(small_run(model={"path": str(other)})) as session:
        expected, _ = scores(session)
    model = {"reference_path": str(other)}
    with open_session(small_run(model=model, algorithm={"kl_reward_coef": 0.1})) as session:
        policy, reference = scores(session)
    assert torch.equal(reference, expected)
    assert (policy - reference).abs().max() > 1e-4
