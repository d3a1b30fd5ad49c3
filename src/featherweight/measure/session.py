"""One recipe in one process: load it, look at its memory, its quality, its speed.

Every public method is a request that `worker` may pass on; arguments and answers are JSON types.
"""

from __future__ import annotations

import importlib
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from featherweight import machine, verify
from featherweight.errors import FeatherweightError, MissingExtraError
from featherweight.ledger import apply
from featherweight.measure import clock, quality
from featherweight.measure.resident import CPU, Watch, floor
from featherweight.measure.text import paragraphs, read_text
from featherweight.measure.workload import Workload
from featherweight.models import Loaded, load
from featherweight.recipe import Recipe
from featherweight.tensors import decoded_bytes, held

PROBE_TOKENS = 4  # decoded to estimate the cost of a round
LONGEST_TEXT = 512  # tokens an encoder reads of one text
LONG_PASS = 3.0  # seconds
NATIVE_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


class Session:
    """The state of one child process: a loaded model and the floor of its memory."""

    loaded: Loaded

    def __init__(self, threads: int, seed: int) -> None:
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        self.seed = seed

    # --- load -------------------------------------------------------------------------------

    def load(
        self,
        model: str,
        recipe: str | None,
        device: str | None,
        trust_remote_code: bool,
    ) -> dict[str, Any]:
        """Load the model and apply the recipe; without one, the checkpoint's own dtype."""
        parsed = Recipe.parse(recipe) if recipe is not None else None
        _import_libraries(parsed)
        target = _watched(device)
        self.floor = floor(target)
        with Watch(self.floor, target) as watch:
            start = time.perf_counter()
            self.loaded = load(model, device=device, trust_remote_code=trust_remote_code)
            if parsed is None:
                parsed = _own_dtype(self.loaded.provenance.dtype)
            self.recipe = parsed
            applied = apply(self.loaded.model, parsed, reversible=False)
            clock.wait(self._device)
            seconds = time.perf_counter() - start
        self.receipt = applied.receipt
        here = machine.describe()
        return {
            "recipe": str(parsed),
            "load_s": seconds,
            "load_memory": asdict(watch.peak),
            **self._weights(),
            "receipt": applied.receipt.to_json(),
            "notes": [n for t in parsed for n in t.notes(here, self._device.type)],
            "provenance": asdict(self.loaded.provenance),
            "has_text": self.loaded.tokenizer is not None,
        }

    @property
    def _device(self) -> torch.device:
        return next(self.loaded.model.parameters()).device

    def _weights(self) -> dict[str, Any]:
        """Asked again after the first pass, in which bitsandbytes may repack."""
        weights = held(self.loaded.model)
        decodes = self.loaded.provenance.kind == "decoder"
        return {
            "weights": weights.total,
            "weights_mapped": weights.mapped,
            "bytes_per_token": decoded_bytes(self.loaded.model) if decodes else None,
        }

    # --- does it still work -----------------------------------------------------------------

    @torch.inference_mode()
    def write_reference(self, folder: str) -> dict[str, Any]:
        """Store this model's answers to `verify`'s batches for the other recipes."""
        save_file(verify.outputs(self.loaded.model), Path(folder) / "verify.safetensors")
        return {"tolerance": verify.tolerance(self.loaded.model, self.recipe)}

    @torch.inference_mode()
    def verify(self, folder: str, tolerance: float) -> dict[str, float]:
        """Compare with the stored answers; `tolerance` is the baseline's own share."""
        reference = load_file(Path(folder) / "verify.safetensors")
        allowed = tolerance + verify.tolerance(self.loaded.model, self.recipe)
        answers = verify.outputs(self.loaded.model)
        return verify.compare(reference, answers, allowed, str(self.recipe))

    # --- memory and cost --------------------------------------------------------------------

    @torch.inference_mode()
    def warm_up(self, workload: dict[str, Any], text: str | None) -> dict[str, Any]:
        """Run once: peak memory, KV cache bytes at the end, and seconds of each part."""
        work = Workload.from_json(workload)
        if self.loaded.provenance.kind == "encoder":
            return self._warm_up_encoder(work, text)
        model = self.loaded.model
        limit, asked = quality.longest(model), work.prompt_tokens + work.new_tokens
        if limit is not None and asked > limit:
            raise FeatherweightError(
                f"prompt and new tokens make {asked}, and the model takes {limit}",
                hint="lower --prompt-tokens or --new-tokens",
            )
        costs = {}
        kv_cache = 0
        with Watch(self.floor, self._device) as watch:
            for batch in work.batch_sizes:
                ids = self._ids(batch, work.prompt_tokens)
                start = time.perf_counter()
                _, cache = clock.forward(model, ids)
                clock.wait(self._device)
                seconds = time.perf_counter() - start
                # As many tokens at once as would be generated one by one: the same cache.
                _, cache = clock.forward(model, self._ids(batch, work.new_tokens), cache)
                if batch == work.batch_sizes[0]:
                    kv_cache = held(cache).total
                del cache
                # The first pass also reads from disk and packs: once more, unless that takes long.
                prefill = clock.prefill(model, ids) if seconds < LONG_PASS else seconds
                costs[str(batch)] = {
                    "prefill": prefill,
                    "token": clock.decode(model, self._ids(batch, PROBE_TOKENS)) / PROBE_TOKENS,
                }
        memory = {"run_memory": asdict(watch.peak), "kv_cache": kv_cache}
        served = {"not_served": self.receipt.not_served}
        return {**memory, **self._weights(), **served, "costs": costs}

    def _warm_up_encoder(self, work: Workload, text: str | None) -> dict[str, Any]:
        costs = {}
        with Watch(self.floor, self._device) as watch:
            for batch in work.batch_sizes:
                clock.encode(self.loaded.model, self._batches(work, batch, text))  # warm
                seconds = clock.encode(self.loaded.model, self._batches(work, batch, text))
                costs[str(batch)] = {"encode": seconds}
        memory = {"run_memory": asdict(watch.peak), "kv_cache": None}
        return {**memory, **self._weights(), "not_served": {}, "costs": costs}

    # --- quality ----------------------------------------------------------------------------

    @torch.inference_mode()
    def quality(
        self, text: str | None, tokens: int, texts: int, folder: str, write: bool
    ) -> dict[str, Any]:
        """Quality against the baseline's distributions or embeddings; `write` stores them."""
        body = read_text(text).text
        place = Path(folder)
        model = self.loaded.model
        if self.loaded.provenance.kind == "encoder":
            batches = self._batches(Workload(texts=texts), 16, text)
            measured = {"texts": sum(len(inputs["input_ids"]) for inputs in batches)}
            if write:
                quality.write_embeddings(model, batches, place)
                return {"quality": {}, "measured": measured}
            found = quality.compare_embeddings(model, batches, place)
            return {"quality": _plain(found), "measured": measured}
        rows = quality.windows(model, self.loaded.tokenizer, body, tokens)
        found = (
            quality.write_baseline(model, rows, place)
            if write
            else quality.compare_tokens(model, rows, place)
        )
        measured = {
            "windows": len(rows),
            "context": rows.shape[1],
            "scored_tokens": len(rows) * (rows.shape[1] // 2),
        }
        return {"quality": _plain(found), "measured": measured}

    @torch.inference_mode()
    def prompts(self, prompts: list[Any], new_tokens: int) -> list[dict[str, Any]]:
        """Greedy continuations: text and token ids of each prompt."""
        tokenizer, answers = self.loaded.tokenizer, []
        for prompt in prompts:
            inputs = encode_prompt(tokenizer, prompt).to(self._device)
            output = self.loaded.model.generate(
                **inputs, max_new_tokens=new_tokens, do_sample=False, num_beams=1
            )
            ids = output[0, inputs["input_ids"].shape[1] :].tolist()
            text = tokenizer.decode(ids, skip_special_tokens=True)
            answers.append({"text": text, "ids": ids})
        return answers

    # --- speed ------------------------------------------------------------------------------

    @torch.inference_mode()
    def sample(self, workload: dict[str, Any], part: str, text: str | None) -> dict[str, float]:
        """One sample of a part of a round, in seconds, by batch size: `"1 prefill"`."""
        work = Workload.from_json(workload)
        model, samples = self.loaded.model, {}
        for batch in work.batch_sizes:
            if part == "encode":
                batches = self._batches(work, batch, text)
                samples[f"{batch} encode"] = clock.encode(model, batches)
                samples[f"{batch} tokens"] = float(sum(b["attention_mask"].sum() for b in batches))
                continue
            prompt = self._ids(batch, work.prompt_tokens)
            clock.forward(model, prompt[:, :1])  # the other side ran before: wake up the threads
            if part == "prefill":
                samples[f"{batch} prefill"] = clock.prefill(model, prompt)
            elif part == "decode":
                ids = self._ids(batch, work.new_tokens)
                samples[f"{batch} decode"] = clock.decode(model, ids)
            else:
                first, rest = clock.generate(model, prompt, work.new_tokens)
                samples[f"{batch} first"], samples[f"{batch} generate"] = first, rest
        return samples

    def _ids(self, batch: int, length: int) -> torch.Tensor:
        vocabulary = self.loaded.model.config.get_text_config().vocab_size
        return clock.random_ids(vocabulary, batch, length, self.seed, self._device)

    def _batches(self, work: Workload, batch: int, text: str | None) -> list[dict[str, Any]]:
        """Paragraphs of the text, padded in batches in the order they come."""
        tokenizer = self.loaded.tokenizer
        if tokenizer is None:
            raise FeatherweightError(
                "an encoder is measured on text, and the checkpoint has no tokenizer",
                hint="put its tokenizer files beside the weights",
            )
        found = paragraphs(read_text(text).text, work.texts)
        if not found:
            raise FeatherweightError(
                "the text has no paragraph of four words or more", hint="give another --text"
            )
        limit = quality.longest(self.loaded.model) or LONGEST_TEXT
        limit = min(LONGEST_TEXT, limit, tokenizer.model_max_length)
        return [
            tokenizer(
                found[at : at + batch],
                padding=True,
                truncation=True,
                max_length=limit,
                return_tensors="pt",
            ).to(self._device)
            for at in range(0, len(found), batch)
        ]


def encode_prompt(tokenizer: Any, prompt: Any) -> Any:
    """Token ids and mask of a prompt: text as it is, messages through the chat template."""
    if isinstance(prompt, str):
        return tokenizer(prompt, return_tensors="pt")
    if not tokenizer.chat_template:
        raise FeatherweightError(
            "a prompt is messages, and the model has no chat template",
            hint='give it as text: {"prompt": …}',
        )
    return tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )


def _own_dtype(dtype: str) -> Recipe:
    if dtype not in NATIVE_DTYPES:
        raise FeatherweightError(
            f"the checkpoint's dtype is {dtype}, which no recipe names",
            hint="name the baseline first, such as 'bf16'",
        )
    return Recipe.parse(NATIVE_DTYPES[dtype])


def _watched(device: str | None) -> torch.device:
    """The GPU of this name, its context made, so that this is of the floor; else the CPU.

    `load` says what is wrong with a device that is not there.
    """
    try:
        found = torch.device(device or "cpu")
        if found.type == "cuda":
            torch.zeros(1, device=found)
            return found
    except (RuntimeError, AssertionError):
        pass
    return CPU


def _import_libraries(recipe: Recipe | None) -> None:
    """Load what the model will need, so that it counts as floor and not as the model's memory."""
    importlib.import_module("transformers.generation.utils")
    importlib.import_module("transformers.modeling_utils")
    for technique in recipe or ():
        if technique.extra:
            try:
                importlib.import_module(technique.extra)
            except ImportError:
                raise MissingExtraError(technique.extra, technique.extra, f"'{recipe}'") from None


def _plain(found: dict[str, Any]) -> dict[str, Any]:
    return {key: asdict(estimate) for key, estimate in found.items()}
