"""`featherweight generate`."""

from __future__ import annotations

import time
from typing import Any

import click

from featherweight.cli.options import model_options
from featherweight.errors import ModelError


@click.command("generate")
@click.argument("model")
@click.argument("prompt")
@click.option("--recipe", help="Such as bf16+flash. [default: the checkpoint as it is]")
@click.option("--new-tokens", "-n", default=128, show_default=True, type=click.IntRange(2))
@click.option("--sample", is_flag=True, help="Sample as the model's settings say, not greedily.")
@click.option("--raw", is_flag=True, help="Give the prompt as it is, without a chat template.")
@click.option("--seed", default=0, show_default=True)
@model_options
def command(
    model: str,
    prompt: str,
    recipe: str | None,
    new_tokens: int,
    sample: bool,
    raw: bool,
    seed: int,
    threads: int | None,
    device: str | None,
    trust_remote_code: bool,
    revision: str | None,
) -> None:
    """Continue PROMPT with MODEL; text to stdout, speed and memory to stderr.

    \b
    Example:
      featherweight generate smollm2-135m "Why is the sky blue?" --recipe bf16
    """
    import torch
    import transformers

    from featherweight.measure.session import encode_prompt
    from featherweight.models import load
    from featherweight.tensors import held

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)
    loaded = load(
        model, recipe, device=device, trust_remote_code=trust_remote_code, revision=revision
    )
    if loaded.provenance.kind != "decoder" or loaded.tokenizer is None:
        what = loaded.provenance.architecture
        why = "has no tokenizer" if loaded.provenance.kind == "decoder" else "does not write text"
        raise ModelError(f"'{model}' ({what}) {why}", hint="name a …ForCausalLM with a tokenizer")
    chat = loaded.tokenizer.chat_template and not raw
    given: Any = [{"role": "user", "content": prompt}] if chat else prompt
    inputs = encode_prompt(loaded.tokenizer, given).to(loaded.model.device)
    clock = _Clock(loaded.tokenizer)
    sampling = (
        {"do_sample": True} if sample else {"do_sample": False, "temperature": None, "top_p": None}
    )
    start = time.perf_counter()
    with torch.inference_mode():
        loaded.model.generate(**inputs, max_new_tokens=new_tokens, streamer=clock, **sampling)
    click.echo()
    prompt_tokens = inputs["input_ids"].shape[1]
    first, last, count = clock.times[0], clock.times[-1], len(clock.times)
    parts = [f"prefill {prompt_tokens / (first - start):,.1f} t/s ({prompt_tokens} tokens)"]
    if count > 1:
        rate = (count - 1) / (last - first)
        parts.append(f"decode {rate:,.1f} t/s ({count} tokens){_share(loaded.model, rate)}")
    parts.append(f"weights {held(loaded.model).total / 2**20:,.0f} MiB")
    parts.append(f"recipe {recipe or 'none: ' + loaded.provenance.dtype + ' as it is'}")
    click.echo("; ".join(parts), err=True)


def _share(model: Any, rate: float) -> str:
    """How much of the read bandwidth decoding uses, where all weights are read for each token."""
    from featherweight import machine
    from featherweight.tensors import decoded_bytes

    read = decoded_bytes(model) if model.device.type == "cpu" else None
    if read is None:
        return ""
    bandwidth = machine.probe().peak_bandwidth.value * 1e9
    return f", {100 * read * rate / bandwidth:.0f} % of the read bandwidth"


class _Clock:
    """A streamer that prints text as it comes and notes when each token came."""

    def __init__(self, tokenizer: Any) -> None:
        from transformers import TextStreamer

        self.times: list[float] = []
        self._prompt = True
        self._text = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._text.on_finalized_text = self._print  # type: ignore[method-assign]

    def put(self, value: Any) -> None:
        if not self._prompt:
            self.times.append(time.perf_counter())
        self._prompt = False
        self._text.put(value)

    def end(self) -> None:
        self._text.end()

    @staticmethod
    def _print(text: str, stream_end: bool = False) -> None:
        click.echo(text, nl=False)
