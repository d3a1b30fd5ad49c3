"""What a GPU does otherwise than a CPU: which kernels run, and what they keep."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from featherweight.anatomy import gpus
from featherweight.anatomy.attention import Kernels, choose
from featherweight.anatomy.cuda import CudaFunctions, inside
from featherweight.anatomy.eras import Era
from featherweight.anatomy.trace import Trace
from featherweight.anatomy.tracker import Tracker
from featherweight.errors import FeatherweightError

MIB = 1 << 20
NOW = Era.of("2.13")
A100, V100, ADA, H100 = (gpus.find(name) for name in ("a100-40gb", "v100-16gb", "rtx4090", "h100"))


def traced(
    program: Callable[[], object],
    gpu: gpus.Gpu = A100,
    era: Era = NOW,
    autocast: torch.dtype | None = None,
    kernels: Kernels | None = None,
) -> Trace:
    functions = CudaFunctions(gpu, era, kernels or Kernels(), autocast)
    with FakeTensorMode(), Tracker(inside(gpu)) as tracker, functions:
        kept = program()
        tracker.phase("backward")
    del kept
    return tracker.trace


def saved(trace: Trace) -> int:
    """Bytes that the forward pass left behind, without what went in."""
    return sum(
        b.nbytes for b in trace.blocks if b.died < 0 and b.operation not in ("ones", "zeros")
    )


def test_dropout_keeps_one_byte_an_element() -> None:
    def program() -> object:
        x = torch.ones(1024, 256, requires_grad=True)
        return x, F.dropout(x, 0.1)

    assert saved(traced(program)) == 1024 * 256 * (4 + 1)  # output and mask


def test_no_dropout_takes_nothing() -> None:
    def program() -> object:
        x = torch.ones(1024, 256, requires_grad=True)
        return x, F.dropout(x, 0.0), F.dropout(x, 0.1, training=False)

    assert saved(traced(program)) == 0


def test_a_softmax_into_float32_makes_no_copy_of_its_input() -> None:
    def program() -> object:
        x = torch.ones(1024, 256, dtype=torch.float16, requires_grad=True)
        return x, F.softmax(x, dim=-1, dtype=torch.float32)

    trace = traced(program)
    assert int(trace.allocated().max()) == 1024 * 256 * (2 + 4)


@pytest.mark.parametrize(("version", "bytes_an_element"), [("1.10", 8), ("1.11", 4)])
def test_softmax_kept_its_input_until_torch_1_11(version: str, bytes_an_element: int) -> None:
    def program() -> object:
        x = torch.ones(1024, 256, requires_grad=True)
        return x, F.softmax(x * 2, dim=-1)

    assert saved(traced(program, era=Era.of(version))) == 1024 * 256 * bytes_an_element


@pytest.mark.parametrize(
    ("version", "zeroes", "workspace", "at_once"),
    [("1.10", True, False, False), ("1.13.1", True, True, False), ("2.0", False, True, True)],
)
def test_habits_of_older_torch(version: str, zeroes: bool, workspace: bool, at_once: bool) -> None:
    era = Era.of(version)
    assert era.zeroes_gradients is zeroes
    assert era.holds_workspace is workspace
    assert era.steps_at_once is at_once


def test_what_is_no_version_is_refused() -> None:
    with pytest.raises(FeatherweightError, match="'new' is no version of torch"):
        Era.of("new")


def test_a_product_copies_an_operand_that_cublas_cannot_read() -> None:
    def program() -> object:
        one = torch.ones(1, 1).expand(512, 256)
        return one @ torch.ones(256, 128)

    trace = traced(program)
    hidden = [b.nbytes for b in trace.blocks if b.category == "workspace"]
    assert hidden == [512 * 256 * 4]


def test_a_transposed_operand_is_read_as_it_lies() -> None:
    trace = traced(lambda: torch.ones(256, 512).t() @ torch.ones(128, 256).t())
    assert not [b for b in trace.blocks if b.category == "workspace"]


@pytest.mark.parametrize(("gpu", "size"), [("a100-40gb", 1), ("h100-80gb", 32)])
def test_a_bias_goes_to_cublaslt_with_a_workspace_for_the_call(gpu: str, size: int) -> None:
    def program() -> object:
        return F.linear(torch.ones(8, 16), torch.ones(4, 16), torch.ones(4))

    trace = traced(program, gpu=gpus.find(gpu))
    assert [b.nbytes for b in trace.blocks if b.category == "workspace"] == [size * MIB]


def attention(
    dtype: torch.dtype = torch.float16,
    head_dim: int = 64,
    mask: bool = False,
    grouped: bool = False,
    grad: bool = True,
    queries: int = 128,
) -> dict:
    q = torch.ones(2, 8, queries, head_dim, dtype=dtype, requires_grad=grad)
    k = torch.ones(2, 2 if grouped else 8, 128, head_dim, dtype=dtype, requires_grad=grad)
    given = torch.ones(2, 1, 128, 128, dtype=torch.bool) if mask else None
    return {"query": q, "key": k, "value": k, "mask": given, "enable_gqa": grouped}


@pytest.mark.parametrize(
    ("gpu", "inputs", "kernel"),
    [
        (A100, attention(), "flash"),
        (A100, attention(torch.bfloat16, grouped=True), "flash"),
        (A100, attention(torch.float32), "efficient"),
        (A100, attention(mask=True), "efficient"),
        (A100, attention(mask=True, grouped=True), "math"),
        (V100, attention(), "efficient"),
        (V100, attention(torch.bfloat16), "math"),
        (A100, attention(head_dim=256), "flash"),
        (ADA, attention(head_dim=256), "flash"),
        (ADA, attention(head_dim=256) | {"dropout_p": 0.1}, "efficient"),
        (ADA, attention(head_dim=208), "efficient"),
        (ADA, attention(head_dim=208, grad=False), "flash"),
        (A100, attention(head_dim=208), "flash"),
        (A100, attention(mask=True, head_dim=60), "math"),
        (A100, attention(torch.float32, head_dim=60), "efficient"),
        (A100, attention(torch.float32, head_dim=62), "math"),
        (V100, attention(torch.float32, head_dim=62), "efficient"),
        (A100, attention(queries=8) | {"is_causal": True}, "efficient"),
        (H100, attention(), "cudnn"),
        (H100, attention(mask=True), "cudnn"),
        (H100, attention(grouped=True), "cudnn"),
        (H100, attention(head_dim=60), "flash"),
        (H100, attention(torch.float32), "efficient"),
        (H100, attention() | {"allowed": ("flash", "efficient", "math")}, "flash"),
        (A100, attention(torch.float64), "math"),
    ],
)
def test_the_kernel_is_the_one_that_torch_would_choose(
    gpu: gpus.Gpu, inputs: dict, kernel: str
) -> None:
    assert choose(gpu, **inputs) == kernel


def test_flash_attention_keeps_its_inputs_its_output_and_one_number_a_row() -> None:
    def program() -> object:
        q, k, v = (torch.ones(2, 8, 128, 64, dtype=torch.float16) for _ in range(3))
        for tensor in (q, k, v):
            tensor.requires_grad_()
        return q, k, v, F.scaled_dot_product_attention(q, k, v)

    kernels = Kernels()
    kept = saved(traced(program, kernels=kernels))
    assert kernels.used == ["flash"]
    expected = 2 * 8 * 128 * 64 * 2 + 2 * 8 * 128 * 4
    assert expected <= kept <= expected + 64  # and the state of a random generator


def test_plain_arithmetic_keeps_the_score_matrix() -> None:
    def program() -> object:
        q, k, v = (torch.ones(2, 8, 128, 64) for _ in range(3))
        for tensor in (q, k, v):
            tensor.requires_grad_()
        return q, k, v, F.scaled_dot_product_attention(q, k, v)

    kept = saved(traced(program, kernels=Kernels(allowed=("math",))))
    assert kept >= 2 * 8 * 128 * 128 * 4


def test_mixed_precision_of_cuda_normalises_in_float32() -> None:
    def program() -> object:
        x = torch.ones(64, 256, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.float16):
            y = F.linear(x, torch.ones(256, 256, requires_grad=True))
            assert y.dtype is torch.float16
            assert F.softmax(y, dim=-1).dtype is torch.float32
            assert F.layer_norm(y, (256,)).dtype is torch.float32
        return y

    traced(program, autocast=torch.float16)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("A100-40GB", "a100-40gb"),
        ("NVIDIA L40S-48GB", "l40s"),
        ("RTX 3080Ti laptop 16GB", "rtx3080ti-laptop"),
        ("h100", "h100-80gb"),
        ("Tesla T4", "t4"),
        ("V100-16GB", "v100-16gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX 6000 Ada", "6000ada"),
        ("RTX 2060", "rtx2060"),
    ],
)
def test_gpus_by_the_names_that_people_write(given: str, found: str) -> None:
    assert gpus.find(given).name == found


def test_a_name_that_fits_two_sizes_or_none_is_refused_with_the_nearest() -> None:
    with pytest.raises(FeatherweightError, match="nearest: a100-40gb, a100-80gb"):
        gpus.find("A100")
    with pytest.raises(FeatherweightError, match="no GPU is known as 'voodoo2'"):
        gpus.find("voodoo2")
