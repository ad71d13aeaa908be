"""The corrections of SGLang 0.5.15, each on a fake of the exact interface: wrong before, right after."""

import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from relax_npu.sglang import PLUGINS, refresh_derived_weights
from relax_npu.sglang.weights import DerivedWeightError
from relax_npu.upstream.fix import FixMismatchError, _applied

BY_NAME = {plugin.name: plugin for plugin in PLUGINS}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """Puts a module in SGLang's place and corrects it."""
    _applied.clear()

    def make(plugin: str, **names) -> types.ModuleType:
        path = BY_NAME[plugin].module
        for depth in range(1, path.count(".") + 1):
            parent = ".".join(path.split(".")[:depth])
            monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
        module = types.ModuleType(path)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, path, module)
        return module

    yield make
    _applied.clear()


def correct(plugin: str) -> None:
    BY_NAME[plugin].install(version="0.5.15")


class Group:
    """SGLang's group of ranks: what the first rank has reaches the others."""

    def __init__(self, ranks: int = 1) -> None:
        self.world_size = ranks
        self.first: torch.Tensor | None = None

    def broadcast(self, input_: torch.Tensor, src: int = 0) -> torch.Tensor:
        assert src == 0
        if self.first is None:
            self.first = input_.clone()
        return input_.copy_(self.first)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """The modules that know a server's ranks; all of them serve all requests unless a test says otherwise."""
    told = types.SimpleNamespace(whole=Group(), attention=Group(), apart=False)
    distributed = types.ModuleType("sglang.srt.distributed")
    distributed.get_tp_group = lambda: told.whole
    attention = types.ModuleType("sglang.srt.layers.dp_attention")
    attention.get_attention_tp_group = lambda: told.attention
    attention.is_dp_attention_enabled = lambda: told.apart
    for module in (distributed, attention):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return told


def eagle(batch: int, drafts: int):
    """`eagle_utils` as far as the NPU goes: the most likely token, compared with the drafts."""
    names = {"torch": torch, "verify_tree_greedy_func": lambda target: target}

    def eagle_sample(verify_input, batch, logits_output, vocab_mask=None):
        module = sys.modules[BY_NAME["sglang-sampled-verification"].module]
        target = module.torch.argmax(logits_output.next_token_logits, dim=-1)
        return module.verify_tree_greedy_func(target.reshape(-1, drafts))

    return names | {"eagle_sample": eagle_sample}


def sampling(batch: int, temperature: float = 1.0, top_k: int = 1 << 30, top_p: float = 1.0):
    return types.SimpleNamespace(
        is_all_greedy=False,
        temperatures=torch.full((batch, 1), temperature),
        top_ks=torch.full((batch,), top_k),
        top_ps=torch.full((batch,), top_p),
    )


def verified(module, logits: torch.Tensor, info) -> torch.Tensor:
    batch = types.SimpleNamespace(sampling_info=info)
    return module.eagle_sample(None, batch, types.SimpleNamespace(next_token_logits=logits)).flatten()


@pytest.mark.parametrize("apart", [False, True])
def test_every_rank_verifies_by_the_same_draw(fake, groups, apart: bool) -> None:
    """Ranks draw from generators of their own; a token that differs would leave one waiting for the other."""
    module = fake("sglang-sampled-verification", **eagle(200, 2))
    correct("sglang-sampled-verification")
    groups.apart = apart
    groups.attention, groups.whole = (Group(2), Group()) if apart else (Group(), Group(2))
    logits = torch.zeros(400, 5)
    ranks = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        ranks.append(verified(module, logits, sampling(200)).tolist())
    assert ranks[0] == ranks[1]
    assert len(set(ranks[0])) == 5


def test_an_sglang_without_its_groups_is_not_corrected(fake, groups) -> None:
    fake("sglang-sampled-verification", **eagle(1, 1))
    del sys.modules["sglang.srt.distributed"].get_tp_group
    with pytest.raises(FixMismatchError, match=r"sglang\.srt\.distributed has no get_tp_group"):
        correct("sglang-sampled-verification")


def test_verified_tokens_are_samples_of_the_model(fake, groups) -> None:
    module = fake("sglang-sampled-verification", **eagle(2000, 2))
    importer = types.ModuleType("sglang.srt.speculative.worker")
    importer.eagle_sample = module.eagle_sample
    sys.modules[importer.__name__] = importer
    p = torch.tensor([0.5, 0.3, 0.2])
    logits = p.log().expand(4000, 3)
    assert verified(module, logits, sampling(2000)).unique().tolist() == [0], "upstream's fault"
    correct("sglang-sampled-verification")
    assert importer.eagle_sample is module.eagle_sample, "a worker imported before follows"
    torch.manual_seed(1)
    counts = torch.bincount(verified(module, logits, sampling(2000)), minlength=3) / 4000
    # Five standard deviations of a share of 4000 draws.
    assert torch.allclose(counts, p, atol=5 * (0.25 / 4000) ** 0.5)
    cold = torch.bincount(verified(module, logits, sampling(2000, temperature=0.5)), minlength=3) / 4000
    assert torch.allclose(cold, p.square() / p.square().sum(), atol=5 * (0.25 / 4000) ** 0.5)
    del sys.modules[importer.__name__]


@pytest.mark.parametrize(
    ("settings", "allowed"), [({"top_k": 1}, {0}), ({"top_p": 0.4}, {0}), ({"top_k": 2}, {0, 1})]
)
def test_verified_tokens_keep_to_top_k_and_top_p(fake, groups, settings: dict, allowed: set) -> None:
    module = fake("sglang-sampled-verification", **eagle(500, 2))
    correct("sglang-sampled-verification")
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(1000, 3)
    assert set(verified(module, logits, sampling(500, **settings)).tolist()) == allowed


def test_a_greedy_batch_is_verified_greedily(fake, groups) -> None:
    module = fake("sglang-sampled-verification", **eagle(3, 1))
    correct("sglang-sampled-verification")
    info = sampling(3)
    info.is_all_greedy = True
    assert verified(module, torch.eye(3), info).tolist() == [0, 1, 2]
    likeliest = module.torch.argmax(torch.tensor([[0.4, 0.6]] * 99), dim=-1)
    assert likeliest.unique().tolist() == [1], "outside of a verification nothing is drawn"


PARAMETERS = BY_NAME["sglang-cache-slots"].expects["assign_extend_cache_locs_func"]


def write_sixteen(
    req_pool_indices, req_to_token, start_offset, end_offset, batch_size, draft_token_num, device
):
    """As sgl-kernel-npu does it: 16 slots a row, into a result of `draft_token_num` a row."""
    memory = torch.full((batch_size * draft_token_num + 64,), -1, dtype=torch.int32)
    for row in range(batch_size):
        start = int(start_offset[row])
        values = req_to_token[req_pool_indices[row], start : start + 16].to(torch.int32)
        memory[row * draft_token_num : row * draft_token_num + 16] = values
    return memory


def test_slots_cost_no_copy_of_whole_rows(fake) -> None:
    """A row is as long as the longest context: 256k slots for each request, at each step."""
    fake("sglang-cache-slots", assign_extend_cache_locs_func=write_sixteen)
    correct("sglang-cache-slots")
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
            nonlocal largest
            made = function(*args, **(kwargs or {}))
            largest = max(largest, made.numel())
            return made

    module = sys.modules[BY_NAME["sglang-cache-slots"].module]
    req_to_token = torch.arange(4 * 5000, dtype=torch.int32).view(4, 5000)
    start = torch.tensor([10, 4000])
    with Sizes():
        module.assign_extend_cache_locs_func(
            torch.tensor([2, 0]), req_to_token, start, start + 3, 2, 3, "cpu"
        )
    assert largest <= 6


def test_slots_end_with_the_row(fake) -> None:
    module = fake("sglang-cache-slots", assign_extend_cache_locs_func=write_sixteen)
    req_to_token = torch.arange(200, dtype=torch.int32).view(4, 50)
    call = (torch.tensor([2, 0]), req_to_token, torch.tensor([10, 3]), torch.tensor([13, 6]), 2, 3, "cpu")
    overrun = module.assign_extend_cache_locs_func(*call)
    assert (overrun[6:] != -1).any(), "upstream's fault"
    correct("sglang-cache-slots")
    assert module.assign_extend_cache_locs_func(*call).tolist() == [110, 111, 112, 3, 4, 5]
    near_the_end = (torch.tensor([1]), req_to_token, torch.tensor([48]), torch.tensor([50]), 1, 3, "cpu")
    assert module.assign_extend_cache_locs_func(*near_the_end).tolist() == [98, 99, 0]


def sampler_module(fake, plugin: str):
    def sample(logits, top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, positions):
        p = logits.softmax(-1)
        p.topk(int(top_ks.max()))
        order = p.sort(descending=True)
        return p.max(dim=-1) * min_ps if need_min_p_sampling else order.indices[:, 0]

    class Sampler:
        def _attach_logprobs_to_output(
            self, logits_output, logprobs, top_logprobs_nums, token_ids_logprobs, *rest
        ):
            logits_output.next_token_ids_logprobs_val = [1.0]  # the wrong field

    names = {
        "multinomial_with_seed": lambda logp, seed, positions: logp.argmax(-1, keepdim=True),
        "Sampler": Sampler,
    }
    return fake(plugin, top_k_top_p_min_p_sampling_from_logits_ascend=sample, **names)


def draw(module, logits, *, top_k=2, min_p=0.0, seed=None):
    rows = len(logits)
    return module.top_k_top_p_min_p_sampling_from_logits_ascend(
        logits,
        torch.full((rows,), top_k),
        torch.ones(rows),
        torch.full((rows,), min_p),
        min_p > 0,
        seed,
        torch.zeros(rows),
    )


class Counted(torch.overrides.TorchFunctionMode):
    searches = 0

    def __torch_function__(self, function, kinds, args=(), kwargs=None):
        if getattr(function, "__name__", "") in ("topk", "sort", "argsort"):
            Counted.searches += 1
        return function(*args, **(kwargs or {}))


def test_the_vocabulary_is_searched_once(fake) -> None:
    module = sampler_module(fake, "sglang-one-top-k")
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(1000, 3).clone()
    for corrected in (False, True):
        if corrected:
            correct("sglang-one-top-k")
        Counted.searches = 0
        with Counted():
            draw(module, logits)
        assert Counted.searches == (1 if corrected else 2)
    drawn = draw(module, logits)
    assert set(drawn.tolist()) == {0, 1}
    assert abs(float((drawn == 0).float().mean()) - 0.5 / 0.8) < 5 * (0.25 / 1000) ** 0.5


def test_a_minimum_probability_works(fake) -> None:
    module = sampler_module(fake, "sglang-one-top-k")
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(200, 3).clone()
    with pytest.raises(TypeError):
        draw(module, logits, min_p=0.9)
    correct("sglang-one-top-k")
    assert set(draw(module, logits, top_k=3, min_p=0.9).tolist()) == {0}
    assert draw(module, logits, top_k=3, seed=torch.zeros(200)).tolist() == [0] * 200


def test_log_probs_of_token_ids_arrive(fake) -> None:
    module = sampler_module(fake, "sglang-token-logprobs")
    output = types.SimpleNamespace()
    arguments = (output, torch.zeros(1, 3), [0], [[1, 2]], None, torch.tensor([0]))
    module.Sampler()._attach_logprobs_to_output(*arguments)
    correct("sglang-token-logprobs")
    with pytest.raises(RuntimeError, match="next_token_token_ids_logprobs_val"):
        module.Sampler()._attach_logprobs_to_output(*arguments)
    output.next_token_token_ids_logprobs_val = output.next_token_token_ids_logprobs_idx = [[1.0, 2.0]]
    module.Sampler()._attach_logprobs_to_output(*arguments)


def test_a_block_without_a_second_stream_uses_one(fake) -> None:
    class Qwen2MoeSparseMoeBlock:
        alt_stream = None
        shared_expert = object()

        def forward_normal_dual_stream(self, hidden_states, use_fused_gate=False):
            self.alt_stream.wait_stream(None)

        def _forward_shared_experts(self, hidden_states, apply_gate):
            return ("shared", hidden_states, apply_gate)

        def _forward_router_experts(self, hidden_states):
            return ("routed", hidden_states)

    fake("sglang-second-stream", Qwen2MoeSparseMoeBlock=Qwen2MoeSparseMoeBlock)
    block = Qwen2MoeSparseMoeBlock()
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'wait_stream'"):
        block.forward_normal_dual_stream("x")
    correct("sglang-second-stream")
    assert block.forward_normal_dual_stream("x") == (("routed", "x"), ("shared", "x", True))


class Layer(torch.nn.Module):
    """A delta-net layer that keeps a transposed copy of its convolution, as the NPU's attention makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_weights = torch.nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        self._conv_weights_t = self.conv_weights.transpose(0, 1).contiguous()


def test_an_update_refills_the_transposed_convolution(fake) -> None:
    class ModelRunner:
        def __init__(self) -> None:
            self.model = torch.nn.Sequential(Layer())

        def update_weights_from_tensor(self, value):
            self.model[0].conv_weights.fill_(value)
            return "updated"

        update_weights_from_disk = update_weights_from_tensor
        update_weights_from_distributed = update_weights_from_tensor
        update_weights_from_ipc = update_weights_from_tensor

    fake("sglang-derived-weights", ModelRunner=ModelRunner)
    runner = ModelRunner()
    address = runner.model[0]._conv_weights_t.data_ptr()
    runner.update_weights_from_tensor(1.0)
    assert (runner.model[0]._conv_weights_t == 0).all(), "upstream's fault: old weights after an update"
    correct("sglang-derived-weights")
    for value, name in enumerate(("tensor", "disk", "distributed", "ipc"), start=2):
        assert getattr(runner, f"update_weights_from_{name}")(float(value)) == "updated"
        assert (runner.model[0]._conv_weights_t == value).all()
    assert runner.model[0]._conv_weights_t.data_ptr() == address, "a captured graph reads this memory"


def test_a_copy_that_does_not_fit_its_source_is_an_error() -> None:
    layer = Layer()
    layer.conv_weights = torch.nn.Parameter(torch.zeros(6, 3), requires_grad=False)
    with pytest.raises(DerivedWeightError, match="_conv_weights_t does not fit"):
        refresh_derived_weights([layer])
    assert refresh_derived_weights([torch.nn.Linear(2, 2)]) == 0


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
def test_another_sglang_is_refused(plugin, fake) -> None:
    with pytest.raises(FixMismatchError, match=r"made for sglang 0\.5\.15, found 0\.5\.23"):
        plugin.install(version="0.5.23")
    fake(plugin.name)
    with pytest.raises(FixMismatchError, match="has no"):
        plugin.install(version="0.5.15")


def test_every_plugin_names_a_test() -> None:
    root = Path(__file__).resolve().parents[3]
    for plugin in PLUGINS:
        path, _, name = plugin.test.partition("::")
        assert f"def {name}(" in (root / path).read_text(), plugin.name
