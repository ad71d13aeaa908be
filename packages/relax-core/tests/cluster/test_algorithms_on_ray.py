"""Algorithms with more models than the policy, and adapters, on trainer ranks of their own."""


def test_ppo_with_adapters_gives_the_bits_of_one_process(small_run, finish, same_results):
    """A critic, and a reference that is the policy without its adapters."""
    sections = {
        "algorithm": {"name": "ppo", "kl_loss_coef": 0.05, "kl": "k2"},
        "critic": {"lr": 1e-2},
        "lora": {"rank": 2},
        "run": {"steps": 2},
    }
    expected = finish(small_run(**sections), "inline")
    assert expected[0][-1]["value_loss"] > 0
    same_results(finish(small_run(**sections, cluster={"mode": "ray"}), "ray"), expected)


def test_distillation_samples_ahead(small_run, small_model, finish):
    steps, _ = finish(
        small_run(
            algorithm={"name": "on_policy_distillation"},
            teacher={"path": str(small_model)},
            run={"steps": 3},
            cluster={"mode": "ray", "placement": "async", "max_staleness": 1},
        ),
        "ahead",
    )
    assert [step["step"] for step in steps] == [0, 1, 2, 3]
    assert max(step.get("staleness_max", 0) for step in steps) == 1
    # The policy starts as its teacher does, and is what moves.
    assert abs(steps[1]["teacher_kl"]) < 1e-3
