"""What only a GPU can show."""

from __future__ import annotations

import pytest
import torch

import featherweight as fw
from featherweight.errors import FeatherweightError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
IDS = torch.arange(24)[None] % 384


def test_flash_in_bf16_equals_sdpa(tiny_llama):
    model = fw.load(str(tiny_llama), "bf16", device="cuda").model
    with torch.inference_mode():
        expected = model(IDS.cuda()).logits
        with fw.apply(model, "flash") as applied:
            assert applied.receipt.actual["attention"] == "flash kernel of torch's SDPA"
            torch.testing.assert_close(model(IDS.cuda()).logits, expected, rtol=0.05, atol=0.05)


def test_flash_in_fp32_is_refused_with_the_reason(tiny_llama):
    model = fw.load(str(tiny_llama), device="cuda").model
    with pytest.raises(FeatherweightError, match=r"cannot run here \(cuda, float32"):
        fw.apply(model, "flash")


@pytest.mark.parametrize("recipe", ["bf16", "bnb-int8", "bnb-nf4:double", "bnb-fp4"])
def test_undo_restores_every_bit(tiny_llama, recipe):
    model = fw.load(str(tiny_llama), device="cuda").model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with fw.apply(model, recipe):
        pass
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_compare_gives_memory_of_the_device(tiny_llama):
    report = fw.compare(
        str(tiny_llama),
        ["fp32", "bf16"],
        device="cuda",
        prompt_tokens=16,
        new_tokens=4,
        runs=2,
        quality_tokens=512,
    )
    for row in report.rows:
        assert row.status == "ok", row.reason
        assert row.run_memory.cuda_allocated >= row.weights
        assert row.run_memory.cuda_process >= row.weights
