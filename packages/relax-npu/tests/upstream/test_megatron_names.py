"""What megatron-core reads of torch means the NPU, also where it was imported before the transfer."""

TRANSFER = "import torch; torch.cuda._lazy_call = lambda call: call()"
MEGATRON = """
    from torch.cuda import _lazy_call
    import torch
    def seed():
        called = []
        _lazy_call(lambda: called.append(1))
        return called
    def type_of(tensor): return tensor.type()
"""


def machine(bench):
    bench.torch()
    bench.torch_npu()
    bench.module("torch_npu.contrib.transfer_to_npu", TRANSFER)
    bench.module("megatron.core.random", MEGATRON)
    return bench


def test_a_module_imported_before_the_transfer_calls_the_npu_all_the_same(bench) -> None:
    source = """
        from megatron.core import random
        before = random.seed()
        from relax_npu import NpuDevice
        NpuDevice().prepare()
        answer = [before, random.seed()]
    """
    assert machine(bench).tell(source) == [[], [1]]


def test_only_megatron_is_told_that_a_tensor_is_of_cuda(bench) -> None:
    source = """
        from relax_npu import NpuDevice
        NpuDevice().prepare(); NpuDevice().prepare()
        import torch
        from megatron.core import random
        answer = [random.type_of(torch.Tensor()), torch.Tensor().type()]
    """
    assert machine(bench).tell(source) == ["torch.cuda.FloatTensor", "torch.npu.FloatTensor"]
