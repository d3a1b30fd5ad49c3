"""`fw.memory`: the memory that a model needs, from its config alone."""

from __future__ import annotations

from typing import Any

from featherweight.anatomy.asked import DEFAULT_SEQ_LEN, ask
from featherweight.anatomy.result import Memory
from featherweight.recipe import Recipe


def memory(
    model: Any,
    recipe: str | Recipe | None = None,
    *,
    train: bool | Any = False,
    task: str | None = None,
    batch_size: int | None = None,
    seq_len: int = DEFAULT_SEQ_LEN,
    padding: float = 0.0,
    optimizer: str | None = None,
    loss: str | None = None,
    mixed_precision: str | None = None,
    accumulate: int | None = None,
    max_grad_norm: float | None = None,
    prompt_tokens: int = 512,
    new_tokens: int = 128,
    num_beams: int = 1,
    forward: bool = False,
    outputs: str | None = None,
    lora: Any = None,
    gpu: str | None = None,
    cuda_context: int | None = None,
    transformers: str | None = None,
    torch_version: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Memory:
    """Predict the memory of training, generation or a forward pass, by a dry run of the program.

    Args:
        model: a name or folder (only its config is read), a config, or a model.
        recipe: such as `fp32+eager+checkpointing` or `nf4:double+lora:r=8`; without a dtype in it
            the checkpoint's own.
        train: True for a training step; or `TrainingArguments`, of which batch size, accumulation,
            checkpointing, mixed precision, optimizer and clipping are taken.
        task: the head, one of `causal-lm`, `masked-lm`, `sequence-classification`,
            `token-classification`, `encoder`, `seq2seq`, `speech-seq2seq`; by default the config's.
        batch_size, seq_len: rows and tokens of a (micro-)batch.
        padding: share of tokens that are padding; above 0 a mask is passed.
        optimizer: a name of `Trainer`'s (`adamw`: its default), or `none`: forward and backward.
        loss: `"logits.sum"` instead of the model's own.
        mixed_precision: `fp16` or `bf16`, as `torch.autocast` does it.
        accumulate: micro-batches of one step.
        max_grad_norm: gradients are clipped to it; 0: they are not.
        prompt_tokens, new_tokens, num_beams: of generation, which is the default.
        forward: one forward pass without gradients instead, of batch_size × seq_len.
        outputs: `"held"`: until those of the next pass are there, as a loop that assigns them
            does; `"dropped"` as soon as they are used. By default as `Trainer` and `generate` do.
        lora: a PEFT `LoraConfig`, as if the recipe ended in `lora`.
        gpu: a name such as `a100-40gb`; without it, this machine's CPU.
        cuda_context: bytes that CUDA itself takes; by default that of the GPU's generation.
        transformers: another version to run under, such as `4.43.3`.
        torch_version: the habits of an older torch, such as `1.10`.
        revision, trust_remote_code: of a hub id, as in `load`.

    Returns the peak in bytes (`.peak.allocated`, `.reserved`, `.process`) and what it is made of.

    Raises ModelError for a model that is unknown or cannot be traced, RecipeError, and
    FeatherweightError for an impossible workload.
    """
    given = locals()
    return ask(**given).predict()
