"""Dry runs under the transformers of another day, for which figures were published."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

import featherweight as fw
from featherweight.anatomy import environments
from featherweight.anatomy.asked import ask
from featherweight.errors import FeatherweightError, ModelError

MB = 10**6


@pytest.fixture(scope="module")
def version() -> str:
    """transformers 4.43.3, installed into the cache once; skipped where there is no network."""
    try:
        environments.install("4.43.3")
    except FeatherweightError as error:
        pytest.skip(f"transformers 4.43.3 cannot be installed here: {error}")
    return "4.43.3"


@pytest.mark.timeout(300)  # the first time it is installed
@pytest.mark.parametrize(
    ("attention", "tokens", "published_mb"),
    [("eager", 128, 1789.95), ("eager", 2048, 13484.1), ("sdpa", 1024, 2408.35)],
)
def test_pythia_410m_of_transformers_pull_request_31031(
    version: str, attention: str, tokens: int, published_mb: float
) -> None:
    """fp16, forward and backward of logits.sum(), RTX 3080 Ti laptop, torch 2.3: allocated."""
    found = fw.memory(
        "EleutherAI/pythia-410m",
        f"fp16+{attention}",
        train=True,
        seq_len=tokens,
        optimizer="none",
        loss="logits.sum",
        gpu="rtx3080ti-laptop",
        transformers=version,
        torch_version="2.3",
    )
    assert found.versions["transformers"] == version
    assert found.peak.allocated / MB == pytest.approx(published_mb, rel=0.005)


@pytest.mark.parametrize(
    ("attention", "rows", "published_mb"), [("eager", 1, 974.831), ("sdpa", 4, 4165.26)]
)
def test_a_generation_of_pythia_410m_of_the_same_table(
    version: str, attention: str, rows: int, published_mb: float
) -> None:
    """100 new tokens after `model.to(torch.float16)`, by a `generate` that held its outputs."""
    question = ask(
        "EleutherAI/pythia-410m",
        f"fp16+{attention}",
        batch_size=rows,
        prompt_tokens=128 if rows == 1 else 2048,
        new_tokens=100,
        outputs="held",
        gpu="rtx3080ti-laptop",
        transformers=version,
        torch_version="2.3",
    )
    found = replace(question, work=replace(question.work, halved=True)).predict()
    assert found.peak.allocated / MB == pytest.approx(published_mb, rel=0.001)


def test_a_model_that_the_old_version_does_not_know(version: str) -> None:
    with pytest.raises(FeatherweightError, match=r"under transformers 4\.43\.3: .*'gemma3_text'"):
        fw.memory("gemma-3-1b", "fp32+eager", transformers=version)


def test_errors_of_the_other_process_are_one_line(version: str) -> None:
    with pytest.raises(FeatherweightError, match="has 1,024 positions") as caught:
        fw.memory("gpt2", "fp32+eager", train=True, seq_len=3000, transformers=version)
    assert "\n" not in str(caught.value)


def test_the_version_at_hand_needs_no_other_process() -> None:
    import transformers

    assert environments.is_installed_here(transformers.__version__)
    assert not environments.is_installed_here("4.43.3")


@pytest.mark.parametrize("name", ["newest", "4", "../4.43.3", "4.43.3; rm"])
def test_what_is_no_version_is_refused(name: str) -> None:
    with pytest.raises(FeatherweightError, match="is no version of transformers"):
        environments.install(name)


def test_a_folder_that_cannot_be_written_is_one_line(
    tmp_path: os.PathLike, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")  # type: ignore[operator]
    monkeypatch.setenv("FEATHERWEIGHT_CACHE", str(tmp_path / "file"))  # type: ignore[operator]
    with pytest.raises(FeatherweightError, match="cannot be stored in"):
        environments.install("4.43.3")


def test_a_config_of_remote_code_is_refused(tmp_path: os.PathLike) -> None:
    (tmp_path / "config.json").write_text(  # type: ignore[operator]
        '{"model_type": "own", "auto_map": {"AutoConfig": "code.Config"}}'
    )
    with pytest.raises(ModelError, match="trust"):
        fw.memory(tmp_path, "fp32")
