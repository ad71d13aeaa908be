"""Pictures on a Ray: the bits of one process, for what is sampled and for what is given."""

import json

RAY = {"mode": "ray"}


def test_reinforcement_learning_sees_the_pictures(colours_run, finish, same_results):
    config = colours_run(run={"steps": 2}, trainer={"lr": 1e-2, "precision": "fp32"})
    inline = finish(config, "inline")
    assert len({step["reward"] for step in inline[0] if "reward" in step}) == 2
    same_results(finish(colours_run(cluster=RAY), "ray"), inline)


def test_fine_tuning_sees_the_pictures(colours_run, colours, finish, same_results, tmp_path):
    rows = []
    for line in (colours / "rows.jsonl").read_text().splitlines():
        row = json.loads(line)
        row["messages"].append({"role": "assistant", "content": row.pop("answer")})
        rows.append(json.dumps(row) + "\n")
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    sections = {
        "algorithm": {"name": "sft"},
        "data": {
            "path": str(tmp_path / "rows.jsonl"),
            "images_key": "images",
            "images_root": str(colours),
            "eval_fraction": 0.25,
        },
        "sft": {"samples_per_step": 16},
        "run": {"steps": 12},
    }
    inline = finish(colours_run(**sections), "inline")
    # ln(4) / 2 = 0.69 for who answers without seeing: the answer and the end of the turn.
    assert inline[0][-1]["sft_loss"] < 0.4
    same_results(finish(colours_run(**sections, cluster=RAY), "ray"), inline)
