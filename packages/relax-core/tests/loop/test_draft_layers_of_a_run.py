"""A checkpoint with another number of draft layers than the run asks for."""

import pytest
import torch
from relax_bridge import Checkpoint
from relax_core.loop.session import open_session
from relax_core.model import named_weights


def test_another_number_is_refused_with_both_numbers_and_the_setting(small_run):
    refused = r"holds 1 MTP layers and the model has 2(.|\n)*mtp\.init: copy"
    with pytest.raises(ValueError, match=refused), open_session(small_run(mtp={"layers": 2})):
        pass


@pytest.mark.parametrize(("layers", "init"), [(3, "copy"), (2, "random"), (0, "truncate")])
def test_the_run_has_the_layers_it_asked_for_and_exports_them(small_run, small_model, tmp_path, layers, init):
    source = Checkpoint.open(small_model)
    with open_session(small_run(mtp={"layers": layers, "init": init})) as session:
        assert session.policy.trainer.model.mtp_depths == layers
        weights = {name: x.clone() for name, x in named_weights(session.policy.trainer.model)}
        session.policy.export(tmp_path / "out")
    if layers:
        assert torch.equal(weights["mtp.layers.0.eh_proj.weight"], source.tensor("mtp.fc.weight"))
        last = weights[f"mtp.layers.{layers - 1}.eh_proj.weight"]
        assert torch.equal(last, source.tensor("mtp.fc.weight")) == (init == "copy")
        assert last.std() > 0.01
    out = Checkpoint.open(tmp_path / "out")
    assert out.config["mtp_num_hidden_layers"] == layers
    assert sum(name.endswith("pre_fc_norm_hidden.weight") for name in out.names) == layers


def test_random_weights_have_as_many_as_the_run_asks_for(small_run, small_model):
    model = {"path": str(small_model), "random_weights": True}
    with open_session(small_run(model=model, mtp={"layers": 2})) as session:
        assert session.policy.trainer.model.mtp_depths == 2
        assert session.source.config["mtp_num_hidden_layers"] == 2


def test_reference_and_critic_need_no_draft_layer_for_the_policy_to_repeat_its_own(small_run, tmp_path):
    with open_session(small_run(mtp={"layers": 0, "init": "truncate"})) as session:
        session.policy.export(tmp_path / "bare")
    sections = {
        "algorithm": {"name": "ppo", "kl_reward_coef": 0.1},
        "model": {"reference_path": str(tmp_path / "bare")},
        "mtp": {"repeated": 3},
    }
    with open_session(small_run(**sections)) as session:
        policy = session.policy
        (reference,) = policy.reference
        depths = [model.mtp_depths for model in (policy.trainer.model, policy.critic.model, reference)]
    assert depths == [3, 0, 0]
