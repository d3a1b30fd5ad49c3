"""The very program whose memory is wanted, run for the tracker: train, generate, or forward."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from featherweight.anatomy import optimizers
from featherweight.anatomy.eras import Era, generate_copies_logits, generate_holds_outputs
from featherweight.anatomy.tracker import Tracker
from featherweight.anatomy.work import Work
from featherweight.techniques.checkpointing import checkpoints

MIXED = {"fp16": torch.float16, "bf16": torch.bfloat16}  # of mixed precision
ITERATIONS = 2  # the first makes the optimizer's states, the second is like all that follow


def run(model: Any, work: Work, task: str, tracker: Tracker, era: Era, *, on_gpu: bool) -> None:
    """Run the workload inside the tracker."""
    if work.kind == "train":
        _train(model, work, task, tracker, era, on_gpu)
    elif work.kind == "generate":
        _generate(model, work, tracker)
    else:
        _forward(model, work, task, tracker)


def _train(model: Any, work: Work, task: str, tracker: Tracker, era: Era, on_gpu: bool) -> None:
    at_once = on_gpu and era.steps_at_once
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    if checkpoints(model) and len(trained) < sum(1 for _ in model.parameters()):
        model.enable_input_require_grads()  # as Trainer and PEFT do: else nothing asks to be kept
    optimizer = optimizers.make(
        optimizers.resolve(work.optimizer, era),
        trained,
        at_once=at_once,
        embeddings=[m.weight for m in model.modules() if isinstance(m, nn.Embedding)],
    )
    # A second micro-batch accumulates; a third would be like it.
    micro_batches = min(work.accumulate, 2)
    # A script keeps the outputs of one pass until those of the next are there; Trainer does not.
    holds = work.loss is not None if work.outputs is None else work.outputs == "held"
    held: Any = None
    for _ in range(ITERATIONS):
        for _ in range(micro_batches):
            inputs = make_inputs(model, work, task, labels=work.loss is None)
            tracker.label(inputs.values(), "inputs")
            tracker.phase("forward")
            with _autocast(work, model):
                outputs = model(**inputs)
                loss = outputs.loss if work.loss is None else _logits(outputs).sum()
            held = outputs if holds else None
            del outputs
            if work.accumulate > 1:
                loss = loss / work.accumulate
            tracker.phase("backward")
            loss.backward()
            del loss
        if optimizer is not None:
            with tracker.step():
                if work.max_grad_norm:
                    nn.utils.clip_grad_norm_(trained, work.max_grad_norm, foreach=at_once)
                optimizer.step()
        if not era.zeroes_gradients:
            for parameter in trained:
                parameter.grad = None
    del held


def _forward(model: Any, work: Work, task: str, tracker: Tracker) -> None:
    """One pass, with a cache where the model makes one unasked; a second if outputs are held."""
    model.eval()
    inputs = make_inputs(model, work, task, labels=False)
    tracker.label(inputs.values(), "inputs")
    tracker.phase("forward")
    held: Any = None
    for _ in range(2 if work.outputs == "held" else 1):
        with torch.no_grad(), _autocast(work, model):
            outputs = model(**inputs)
        tracker.label(cached(getattr(outputs, "past_key_values", None)), "KV cache")
        held = outputs
        del outputs
    del held


@torch.no_grad()
def _generate(model: Any, work: Work, tracker: Tracker) -> None:
    """Prefill, the first token, and the last two: between them the cache only grows."""
    model.eval()
    rows = work.batch_size * work.num_beams
    decoder = _Decoder(model, work, rows, tracker)
    tracker.phase("prefill")
    decoder.read(work.prompt_tokens)
    if work.new_tokens < 2:
        return
    tracker.phase("decode")
    decoder.write()
    left = work.new_tokens - 4
    if left > 0:
        with tracker.paused():
            decoder.skip(work.prompt_tokens + 1 + left)
        decoder.label()
    for _ in range(min(2, work.new_tokens - 2)):
        decoder.write()


class _Decoder:
    """What `generate` does, a token at a time, and the cache that it keeps."""

    def __init__(self, model: Any, work: Work, rows: int, tracker: Tracker) -> None:
        self.model, self.work, self.rows, self.tracker = model, work, rows, tracker
        self.past: Any = None
        self.length = 0
        self.encoded: Any = None
        version = _transformers()
        self._holds = work.outputs == "held"
        self._copies = False
        if work.outputs is None:  # as `generate` itself does
            self._holds = generate_holds_outputs(version)
            self._copies = generate_copies_logits(version)
        self._held: Any = None
        accepted = inspect.signature(model.forward).parameters
        self._last_only = next(
            (name for name in ("logits_to_keep", "num_logits_to_keep") if name in accepted), None
        )
        self._cache = "cache" if "cache" in accepted else "past_key_values"  # its older name
        self._two_sided = bool(getattr(model.config, "is_encoder_decoder", False))

    def read(self, tokens: int) -> None:
        """Take the prompt in, in one pass. An encoder-decoder encodes it and begins to write."""
        if self._two_sided:
            inputs = _encoder_inputs(self.model, self.rows, tokens)
            self.tracker.label(inputs.values(), "inputs")
            self.encoded = self.model.get_encoder()(**inputs)
            tokens = 1
        self._reach(tokens)

    def write(self) -> None:
        """One more token."""
        self._reach(self.length + 1)
        if self.work.num_beams > 1:
            self._reorder()

    def skip(self, length: int) -> None:
        """Be where `length` tokens are in the cache, by a pass that nobody sees.

        Where a window slides over it, the cache is filled anew: it lets go of the rest when one
        token follows.
        """
        self._held = None
        length -= self.work.prompt_tokens if self._two_sided else 0
        if not _keeps_all(self.model.config):
            self.past = None
            self._reach(length - 1)
        self._reach(length)

    def label(self) -> None:
        """Tell the tracker which tensors are the cache."""
        self.tracker.label(cached(self.past), "KV cache")

    def _reach(self, length: int) -> None:
        """Read on to `length` tokens: those that are not in the cache, or all where none is."""
        tokens = length if self.past is None else length - self.length
        ids = torch.zeros(self.rows, tokens, dtype=torch.int64)
        given: dict[str, Any] = {
            self._cache: self.past,
            "use_cache": True,
            "attention_mask": torch.ones(self.rows, length, dtype=torch.int64),
        }
        if self._last_only:
            given[self._last_only] = 1
        if self._two_sided:
            given |= {"encoder_outputs": self.encoded, "decoder_input_ids": ids}
            given.pop("attention_mask")
        else:
            given["input_ids"] = ids
        outputs = self.model(**given)
        self.past, self.length = getattr(outputs, self._cache), length
        self._held = outputs if self._holds else None
        self.label()
        logits = _logits(outputs)
        if self._copies:
            logits = logits.clone()
        scores = logits[:, -1].float()  # as `generate` looks at the last one
        if self.work.num_beams > 1:
            scores = torch.log_softmax(scores, dim=-1)
        scores.argmax(dim=-1)

    def _reorder(self) -> None:
        """Beams that survive take their cache with them: a copy of each layer's."""
        beams = torch.zeros(self.rows, dtype=torch.int64)
        if hasattr(self.past, "reorder_cache"):
            self.past.reorder_cache(beams)
        else:
            self.past = self.model._reorder_cache(self.past, beams)
        self.label()


def _keeps_all(config: Any) -> bool:
    """Whether every layer keeps keys and values of all tokens, so that any number may follow."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    others = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    heads = getattr(text, "num_attention_heads", None)
    return bool(heads) and not others and not getattr(text, "sliding_window", None)


def make_inputs(model: Any, work: Work, task: str, *, labels: bool) -> dict[str, torch.Tensor]:
    """A batch of this task: ids [B, S], a mask where there is padding, labels where asked for."""
    rows, tokens = work.batch_size, work.seq_len
    if task in ("seq2seq", "speech-seq2seq"):
        inputs = _encoder_inputs(model, rows, tokens)
        limit = getattr(model.config, "max_target_positions", None) or tokens
        target = torch.zeros(rows, min(tokens, limit), dtype=torch.int64)
        return inputs | {"labels" if labels else "decoder_input_ids": target}
    inputs = {"input_ids": torch.zeros(rows, tokens, dtype=torch.int64)}
    if work.padding:
        mask = torch.ones(rows, tokens, dtype=torch.int64)
        mask[0, tokens - max(1, round(work.padding * tokens)) :] = 0
        inputs["attention_mask"] = mask
    if labels:
        shape = (rows,) if task == "sequence-classification" else (rows, tokens)
        inputs["labels"] = torch.zeros(shape, dtype=torch.int64)
    return inputs


def _encoder_inputs(model: Any, rows: int, tokens: int) -> dict[str, torch.Tensor]:
    """Ids; or for sound, 30 seconds of features [B, mel bins, 2 × positions], whatever is asked."""
    config = model.config
    if hasattr(config, "num_mel_bins"):
        frames = 2 * config.max_source_positions
        features = torch.zeros(rows, config.num_mel_bins, frames, dtype=model.dtype)
        return {"input_features": features}
    return {"input_ids": torch.zeros(rows, tokens, dtype=torch.int64)}


def _logits(outputs: Any) -> torch.Tensor:
    logits = getattr(outputs, "logits", None)
    return outputs[0] if logits is None else logits


def _transformers() -> str:
    from transformers import __version__

    return __version__


def _autocast(work: Work, model: Any) -> AbstractContextManager[Any]:
    if work.mixed_precision is None:
        return nullcontext()
    return torch.autocast(model.device.type, dtype=MIXED[work.mixed_precision])


def cached(past: Any) -> Iterator[torch.Tensor]:
    """Tensors of a cache of any kind: tuples of old, layers of objects of new transformers."""
    seen: set[int] = set()
    stack: list[Any] = [past]
    while stack:
        value = stack.pop()
        if id(value) in seen or value is None:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            stack.extend(value.values())
        elif isinstance(value, (list, tuple, set)):
            stack.extend(value)
        if hasattr(value, "__dict__") and not isinstance(value, (torch.Tensor, type)):
            stack.extend(v for k, v in vars(value).items() if "config" not in k)
