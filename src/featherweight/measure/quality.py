"""Does the model still say the same? Against the baseline, on real text.

Decoders as llama-perplexity does it: windows of `CONTEXT` tokens, of which the second half is
scored, so that every scored token has at least half a window before it. Encoders by the cosine of
each text's embedding to the baseline's, and by how many of its nearest neighbours stay.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from featherweight.errors import FeatherweightError
from featherweight.measure import stats
from featherweight.measure.logprobs import FLOOR, Reader, Writer
from featherweight.measure.result import Estimate

CONTEXT = 512
CHUNK = 16  # rows of the vocabulary held in float64 at once
NEIGHBOURS = 10


def longest(model: Any) -> int | None:
    """Most tokens that the model has positions for; None if it does not say."""
    limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit


def windows(model: Any, tokenizer: Any, text: str, tokens: int) -> torch.Tensor:
    """The text's first tokens as windows [W, C]; raises if the text is too short for one."""
    context = min(CONTEXT, longest(model) or CONTEXT)
    first = tokenizer("a")["input_ids"][:1]  # how the model expects a text to begin
    begin = first if first == [tokenizer.bos_token_id] else []
    room = context - len(begin)
    count = max(1, tokens // context)
    ids = tokenizer(text[: count * context * 20], add_special_tokens=False)["input_ids"]
    count = min(count, len(ids) // room)
    if not count:
        raise FeatherweightError(
            f"the text has {len(ids)} tokens, and quality is measured on windows of {context}",
            hint="give a longer --text",
        )
    rows = torch.tensor(ids[: count * room]).view(count, room)
    return torch.cat([torch.tensor(begin, dtype=torch.long).expand(count, -1), rows], dim=1)


def scored(model: Any, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For each window: log-probabilities [C/2, V] float32, and the true next tokens [C/2]."""
    half = rows.shape[1] // 2
    device = next(model.parameters()).device
    keep = "logits_to_keep" in inspect.signature(model.forward).parameters
    for row in rows:
        keywords = {"logits_to_keep": half + 1} if keep else {}
        logits = model(input_ids=row[None].to(device), use_cache=False, **keywords).logits[0]
        logits = logits[-half - 1 : -1].float().cpu()
        yield torch.log_softmax(logits, dim=-1), row[-half:]


def write_baseline(model: Any, rows: torch.Tensor, folder: Path) -> dict[str, Estimate]:
    """Store the baseline's distributions for `compare_tokens`; returns its perplexity."""
    vocabulary = model.config.get_text_config().vocab_size
    half = rows.shape[1] // 2
    losses = []
    with Writer(folder, len(rows) * half, vocabulary) as writer:
        for logp, targets in scored(model, rows):
            writer.write(logp, targets)
            losses.append(-logp.gather(-1, targets[:, None])[:, 0])
    return {"ppl": stats.perplexity(torch.cat(losses).numpy())}


def compare_tokens(model: Any, rows: torch.Tensor, folder: Path) -> dict[str, Estimate]:
    """Perplexity, its ratio, KL divergence, same top token and Δp against the stored baseline."""
    baseline = Reader(folder)
    logps, klds, tops = [], [], []
    at = 0
    for logp, targets in scored(model, rows):
        logps.append(logp.gather(-1, targets[:, None])[:, 0])
        tops.append(logp.argmax(-1))
        for part in logp.split(CHUNK):
            expected = baseline.rows(at, at + len(part))
            lost = expected.exp() * (expected - torch.log_softmax(part.double(), -1))
            kld = lost.where(expected > 1 - FLOOR, 0).sum(-1)  # below: stored as the floor
            klds.append(kld.clamp_min(0))  # a rounding below zero is zero
            at += len(part)
    return stats.token_quality(
        baseline.logp[:at].numpy(),
        torch.cat(logps).numpy(),
        torch.cat(klds).numpy(),
        (torch.cat(tops) == baseline.tops[:at]).numpy(),
    )


def embeddings(model: Any, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Mean of the last hidden states over real tokens, of unit length: [texts, width]."""
    found = []
    for inputs in batches:
        hidden = model.base_model(**inputs).last_hidden_state.float()
        mask = inputs["attention_mask"][..., None]
        found.append((hidden * mask).sum(1) / mask.sum(1))
    return torch.nn.functional.normalize(torch.cat(found), dim=-1).cpu()


def write_embeddings(model: Any, batches: list[dict[str, torch.Tensor]], folder: Path) -> None:
    """Store the baseline's embeddings for `compare_embeddings`."""
    np.save(folder / "embeddings.npy", embeddings(model, batches).numpy())


def compare_embeddings(
    model: Any, batches: list[dict[str, torch.Tensor]], folder: Path
) -> dict[str, Estimate]:
    """Cosine to the baseline's embeddings, and the share of nearest neighbours kept."""
    before = torch.from_numpy(np.load(folder / "embeddings.npy"))
    after = embeddings(model, batches)
    quality = {"cosine": stats.mean_se((before * after).sum(-1).double().numpy())}
    count = min(NEIGHBOURS, len(before) - 1)
    if count:
        kept = [
            len(set(one.tolist()) & set(other.tolist())) / count
            for one, other in zip(_nearest(before, count), _nearest(after, count), strict=True)
        ]
        quality["neighbours"] = stats.mean_se(np.array(kept))
    return quality


def _nearest(vectors: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of each vector's nearest others, by cosine: [N, count]."""
    similarity = vectors @ vectors.T
    similarity.fill_diagonal_(-2)
    return similarity.topk(count, dim=-1).indices
