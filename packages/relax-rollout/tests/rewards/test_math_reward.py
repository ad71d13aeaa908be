"""The math reward: right, wrong, cheap, and unmoved by hostile text."""

import time
from pathlib import Path

import pytest
from relax_rollout.rewards import RewardInput, RewardRunner, load_reward

QUICK = [
    ("7", "7", True),
    ("The answer is 7.", "7", True),
    ("7.0", "7", True),
    (r"\boxed{\frac{1}{2}}", "0.5", True),
    (r"\boxed{0.33}", "1/3", False),
    ("1,234", "1234", True),
    ("8", "7", False),
    ("", "7", False),
    ("I do not know", "7", False),
    ("3 + 4", "7", False),
    (r"\boxed{3+4}", "7", False),
    ("3 + 4 = 7", "7", True),
    ("3 + 4 = 8", "7", False),
    (r"\boxed{B}", r"\text{B}", True),
    (r"\boxed{x+1}", "$x+1$", True),
    (r"\boxed{7", "7", False),
    ("7 8", "7", False),
]


@pytest.mark.parametrize(("completion", "answer", "correct"), QUICK)
def test_without_algebra_no_process_is_started(runner_of, completion, answer, correct):
    runner = runner_of("math")
    (result,) = runner.score_now([RewardInput("q", completion, answer)])
    assert (result.correct, result.score, result.error) == (correct, float(correct), None)
    assert runner.worker_pids == ()


def test_256_integers_take_less_than_5_ms(runner_of):
    runner = runner_of("math")
    items = [RewardInput(f"{n} + 5", str(n + 5 + n % 2), str(n + 5)) for n in range(256)]
    times = []
    for _ in range(10):
        started = time.thread_time()
        results = runner.score_now(items)
        times.append(time.thread_time() - started)
    assert min(times) < 0.005
    assert [result.correct for result in results] == [n % 2 == 0 for n in range(256)]
    assert runner.worker_pids == ()


SYMBOLIC = [
    (r"\boxed{1+x}", "x+1", True),
    (r"\boxed{x+2}", "x+1", False),
    (r"so it is $2\sqrt{2}$; the answer is $\sqrt{8}$.", r"2\sqrt{2}", True),
    (r"\boxed{\frac{\sqrt{3}}{3}}", r"\frac{1}{\sqrt{3}}", True),
    (r"\boxed{(x-1)(x+1)}", "x^2-1", True),
    (r"\boxed{\{3,1,2\}}", r"\{1,2,3\}", True),
    (r"\boxed{(1,2)}", r"(2,1)", False),
    (r"\boxed{2^{10}}", "1024", True),
    (r"\boxed{x=5}", "5", True),
    (r"\boxed{(12)}", "12", True),
    (r"\boxed{\sin^2 x + \cos^2 x}", "1", True),
    (r"\boxed{\pi}", "3.14", False),
    (r"\boxed{\frac{1}{}}", "7", False),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}", True),
]


@pytest.fixture(scope="module")
def shared_runner():
    with RewardRunner(load_reward("math"), 60.0, 1) as runner:
        yield runner


@pytest.mark.parametrize(("completion", "answer", "correct"), SYMBOLIC)
def test_symbolic_equality(shared_runner, completion, answer, correct):
    (result,) = shared_runner.score_now([RewardInput("q", completion, answer)])
    assert (result.correct, result.score, result.error) == (correct, float(correct), None)


PROOF = Path("/tmp/relax-rollout-was-here")
HOSTILE = [
    "10**10**10",
    "10^{10^{10}}",
    "9^{9^{9^{9^{9}}}}",
    r"9^{9^{9^{9^{9}}}} - 9^{9^{9^{9^{9}}}} + 7",
    "((2^{99999})^{99999})^{99999}",
    "99999999!",
    "100000!!!!",
    r"\sum_{n=1}^{10^{12}} n!",
    r"\prod_{n=1}^{10^{9}} \int_0^1 x^n \sin(x^n) dx",
    r"\int_0^1 \int_0^1 \int_0^1 e^{e^{e^{x y z}}} dx dy dz",
    r"\frac{1}{" * 45 + "2" + "}" * 45,
    r"\sqrt{" * 55 + "2" + "}" * 55,
    "{" * 300,
    "(" * 300,
    "x^" * 190 + "x",
    "+".join(f"x_{{{n}}}" for n in range(55)),
    "(a+b+c+d+e+f)^{400}",
    f"__import__('os').system('touch {PROOF}')",
    f"().__class__.__base__.__subclasses__() ; open('{PROOF}','w')",
    rf"\text{{__import__('os').system('touch {PROOF}')}}",
    rf"\operatorname{{exec}}(open('{PROOF}','w'))",
    f"eval(\"open('{PROOF}','w')\")",
    f"lambda: open('{PROOF}', 'w')",
    r"\input{/etc/passwd}",
    r"\write18{touch " + str(PROOF) + "}",
    r"\begin{matrix}" + "&" * 300 + r"\end{matrix}",
    "\\" * 399,
    "\x00\x01",
    "\ud800",
    "\u202e7",
    "\uff11\uff12",
]


def test_hostile_answers_neither_hang_nor_execute(runner_of):
    PROOF.unlink(missing_ok=True)
    runner = runner_of("math", 1.0, 2)
    completions = [form % text for text in HOSTILE for form in (r"\boxed{%s}", "the answer is $%s$")]
    started = time.monotonic()
    results = runner.score_now([RewardInput("q", text, "7") for text in completions])
    assert time.monotonic() - started < 60
    assert not PROOF.exists()
    for text, result in zip(completions, results, strict=True):
        assert result.score == 0.0, text
        assert result.correct is not True
        if result.error:
            assert "time limit" in result.error or "worker ended" in result.error or "Error" in result.error
    (after,) = runner.score_now([RewardInput("q", r"\boxed{\sqrt{49}}", "7")])
    assert after.correct


def test_a_row_without_an_answer_is_an_error_not_a_crash(runner_of):
    (result,) = runner_of("math", fallback_score=-1.0).score_now([RewardInput("q", "7")])
    assert result.score == -1.0
    assert "the data row has none" in result.error
