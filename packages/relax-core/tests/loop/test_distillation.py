"""On-policy distillation: from a teacher in the trainer and from one behind SGLang's interface."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from relax_bridge import Checkpoint, write_checkpoint
from relax_core.algorithms import AlgorithmConfig, Completions
from relax_core.config import load_config
from relax_core.data import load_prompts, load_tokenizer
from relax_core.loop import run
from relax_core.run import RunDirectory
from transformers import AutoModelForCausalLM


def test_a_tokens_advantage_is_how_much_likelier_the_teacher_finds_it():
    columns = {
        "old_logprob": torch.tensor([-1.0, -2.0, -0.5]).double(),
        "teacher_logprob": torch.tensor([-0.25, -3.0, -0.5]).double(),
    }
    done = Completions(torch.zeros(2).double(), torch.tensor([0, 0]), torch.tensor([0, 0, 1]), columns)
    cfg = AlgorithmConfig(name="on_policy_distillation")
    assert cfg.algorithm.advantage(done, cfg).tolist() == [0.75, -1.0, 0.0]


@pytest.fixture
def teacher(small_model, tmp_path):
    """Another checkpoint: the first with noise."""
    source, generator = Checkpoint.open(small_model), torch.Generator().manual_seed(5)
    tensors = {name: source.tensor(name) for name in source.names}
    tensors = {n: t + 0.05 * torch.randn(t.shape, generator=generator) for n, t in tensors.items()}
    return write_checkpoint(tmp_path / "teacher", tensors, like=source)


@pytest.fixture
def server(teacher):
    """Answers `/generate` with the log-probs that transformers gives for a teacher; its URL."""
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype="float32")

    class Handler(BaseHTTPRequestHandler):
        @torch.no_grad()
        def do_POST(self):
            ids = json.loads(self.rfile.read(int(self.headers["content-length"])))["input_ids"]
            logprobs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
            scored = [[None, ids[0], None]]
            scored += [[float(logprobs[at - 1, ids[at]]), ids[at], None] for at in range(1, len(ids))]
            data = json.dumps({"meta_info": {"input_token_logprobs": scored}}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_address[1]}"
    running.shutdown()
    running.server_close()


def steps_of(config, path):
    with RunDirectory.create(path, config) as directory:
        assert run(config, directory, resume=False) == "finished"
    lines = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "time"} for line in lines][1:]


def test_a_teacher_in_servers_gives_what_one_in_the_trainer_gives(small_run, teacher, server, tmp_path):
    sections = {
        "algorithm": {"name": "on_policy_distillation"},
        "trainer": {"lr": 2e-3, "precision": "fp32"},
        "checkpoint": {"every": 0},
    }
    inside = steps_of(small_run(**sections, teacher={"path": str(teacher)}), tmp_path / "inside")
    outside = steps_of(small_run(**sections, teacher={"urls": (server,)}), tmp_path / "outside")
    for mine, theirs in zip(inside, outside, strict=True):
        for name in ("teacher_kl", "policy_loss", "grad_norm"):
            assert theirs[name] == pytest.approx(mine[name], rel=1e-4, abs=1e-6), name
    assert inside[0]["teacher_kl"] > 1e-3


@torch.no_grad()
def divergence(student, teacher, rows):
    """Mean KL(student || teacher) of the distribution behind each row, over the whole vocabulary."""
    models = [AutoModelForCausalLM.from_pretrained(path, dtype="float32") for path in (student, teacher)]
    total = 0.0
    for row in rows:
        ours, theirs = (m(torch.tensor([row])).logits[0, -1].double().log_softmax(-1) for m in models)
        total += float((ours.exp() * (ours - theirs)).sum())
    return total / len(rows)


def test_the_student_draws_near_the_teacher(small_run, small_model, teacher, tmp_path):
    config = small_run(
        algorithm={"name": "on_policy_distillation"},
        teacher={"path": str(teacher)},
        run={"steps": 25, "device": "cpu", "progress": "none", "threads": 1, "seed": 3, "name": "near"},
        trainer={"lr": 4e-3, "precision": "fp32"},
        rollout={"prompts_per_step": 12, "samples_per_prompt": 4, "max_new_tokens": 3},
        checkpoint={"every": 0},
        eval={"before": False, "after": False},
    )
    steps_of(config, tmp_path / "near")
    tokenizer = load_tokenizer(small_model)
    prompts = load_prompts(config.data, tokenizer, seed=0).train
    rows = [list(prompt.prompt_ids) for prompt in prompts[:20]]
    before = divergence(small_model, teacher, rows)
    after = divergence(tmp_path / "near/hf", teacher, rows)
    assert after < 0.6 * before


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"algorithm.name": "on_policy_distillation"}, "learns from a teacher"),
        ({"teacher.path": "somewhere"}, "algorithm grpo has no teacher"),
        (
            {
                "algorithm.name": "on_policy_distillation",
                "teacher.urls": '["http://localhost:1"]',
                "rollout.temperature": "0.7",
            },
            "at temperature 1",
        ),
        (
            {"teacher.path": "somewhere", "teacher.urls": '["http://localhost:1"]'},
            "both name a teacher",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(flags, words):
    with pytest.raises(ValueError, match=words):
        load_config("quickstart", [word for name, value in flags.items() for word in (f"--{name}", value)])
