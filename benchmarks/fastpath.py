"""What do a long context, a batch and seven billion weights cost a decoder with the fast path?

    python benchmarks/fastpath.py context | batch | large | bitsandbytes | openvino [--rounds 9]

`context`, `batch` and `large` set it beside itself and beside a plain read of memory, on random
weights; `bitsandbytes` (decode) and `openvino` (a prompt at once) set it beside others, on SmolLM2.
`openvino` needs `pip install openvino nncf`; it runs in this process, with as many threads, in the
4-bit formats and with the options below, and its best counts.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import median

import psutil
import torch
from random_checkpoint import default_folder, write
from transformers.utils.logging import disable_progress_bar
from turns import Ours, Read, rate, seconds, take_turns, times

from featherweight import native
from featherweight.measure import clock
from featherweight.named import NAMED, fetch

NF4, INT8 = "nf4:head=int8+fastpath", "int8:head=int8+fastpath"
SHORT, LONG = 128, 4096  # tokens of context
STEPS = 32  # tokens that a sample of `context` decodes
PROMPT = 512  # tokens of `openvino`


def context(options: argparse.Namespace) -> None:
    """One token after a few others and after many."""
    side = Ours(write("1.1b", default_folder("1.1b")), options.recipe or NF4)
    ids = clock.random_ids(32000, 1, LONG, 0, "cpu")

    def decode(cache: object) -> None:
        for column in ids[:, :STEPS].split(1, dim=1):
            clock.forward(side.model, column, cache)
        cache.crop(-STEPS)  # type: ignore[attr-defined]

    def sampler(length: int) -> Callable[[], float]:
        cache = clock.forward(side.model, ids[:, :length])[1]
        return lambda: STEPS / seconds(partial(decode, cache))

    sides = {"read": Read().decode, "short": sampler(SHORT), "long": sampler(LONG)}
    samples = take_turns(sides, options.rounds)
    read = samples["read"]
    print(rate("read", read, "GB/s"))
    for name, length in (("short", SHORT), ("long", LONG)):
        nbytes = side.bytes_read(length + STEPS / 2)
        share = times([s * nbytes / 1e9 for s in samples[name]], read)
        print(f"{rate(f'after {length}', samples[name])}; of the read {share}")
    more = side.bytes_of_cache() * (LONG - SHORT)
    expected = [1 / (1 / s + more / r / 1e9) for s, r in zip(samples["short"], read, strict=True)]
    print(f"    {more / 1e6:.0f} MB more are read; expected of that {median(expected):.1f} t/s")
    print(f"    seconds a token / expected: {times(expected, samples['long'])}")


def batch(options: argparse.Namespace) -> None:
    """Eight sequences at a time, against one."""
    folder = write("1.1b", default_folder("1.1b"))
    for recipe in (NF4, INT8, "bf16:compute=fp32+fastpath"):
        side = Ours(folder, recipe)
        prompts = {n: clock.random_ids(32000, n, SHORT, 0, "cpu") for n in (1, 8)}
        sides = {n: partial(side.decode, ids, options.new_tokens) for n, ids in prompts.items()}
        samples = take_turns({f"batch {n}": sample for n, sample in sides.items()}, options.rounds)
        print(recipe)
        for name, values in samples.items():
            print(rate(name, values))
        print(f"    ratio {times(samples['batch 8'], samples['batch 1'])}")


def large(options: argparse.Namespace) -> None:
    """7B: resident memory, and the share of the bandwidth."""
    before = psutil.Process().memory_info().rss
    recipe = options.recipe or "nf4:double:head=int8+fastpath"
    side = Ours(write("7b", default_folder("7b")), recipe)
    ids = clock.random_ids(32000, 1, SHORT, 0, "cpu")
    side.decode(ids, 2)
    rss = psutil.Process().memory_info().rss
    print(f"resident {rss / 1e9:.2f} GB, {before / 1e9:.2f} before loading")
    sides = {"read": Read().decode, "decode": partial(side.decode, ids, options.new_tokens)}
    samples = take_turns(sides, options.rounds)
    nbytes = side.bytes_read(SHORT + options.new_tokens / 2)
    share = times([sample * nbytes / 1e9 for sample in samples["decode"]], samples["read"])
    print(rate("read", samples["read"], "GB/s"))
    each = f"{nbytes / 1e6:.0f} MB a token"
    print(f"{rate('decode', samples['decode'])}; {each}, of the read {share}")


def bitsandbytes(options: argparse.Namespace) -> None:
    """`generate()` with bitsandbytes' NF4, as on this processor and as on most."""
    from bitsandbytes_backend import without_avx512bf16

    folder = fetch(NAMED["smollm2-135m"])
    recipes = {"ours": Ours(folder, NF4), "bnb-nf4": Ours(folder, "bnb-nf4")}
    with without_avx512bf16():
        recipes["bnb-nf4, no AVX512-BF16"] = Ours(folder, "bnb-nf4")
    ids = clock.random_ids(49152, 1, SHORT, 0, "cpu")
    sides = {name: partial(side.decode, ids, options.new_tokens) for name, side in recipes.items()}
    samples = take_turns(sides, options.rounds)
    for name, values in samples.items():
        print(f"{rate(name, values)}; ours / this {times(samples['ours'], values)}")


def openvino(options: argparse.Namespace) -> None:
    """A prompt at once, beside OpenVINO's 4-bit weights."""
    import nncf
    import openvino
    from transformers.exporters.exporter_openvino import OpenVINOConfig, OpenVINOExporter

    folder = fetch(NAMED["smollm2-135m"])
    fp32, ours = Ours(folder, "fp32"), {name: Ours(folder, name) for name in (NF4, INT8)}
    ids = clock.random_ids(49152, 1, PROMPT, 0, "cpu")
    exact = fp32.logits(ids)
    inputs = {"input_ids": ids, "use_cache": False, "logits_to_keep": 1}
    config = OpenVINOConfig(dynamic=False, stateful=False)
    program = OpenVINOExporter().export(fp32.model, inputs, config=config).program
    sides = {name: partial(side.prefill, ids) for name, side in ours.items()}
    answers = {name: side.logits(ids) for name, side in ours.items()}
    for group in (64, -1):  # codes that share a scale; -1: a row (128 does not divide 576)
        kind = nncf.CompressWeightsMode.INT4_SYM
        weights = nncf.compress_weights(program.clone(), mode=kind, group_size=group, ratio=1.0)
        for codes, precision in product(("0", "32", "64"), ("f32", "bf16")):
            settings = {
                "INFERENCE_NUM_THREADS": options.threads,
                "PERFORMANCE_HINT": "LATENCY",
                "DYNAMIC_QUANTIZATION_GROUP_SIZE": codes,  # of activations
                "INFERENCE_PRECISION_HINT": precision,
            }
            request = openvino.compile_model(weights, "CPU", settings).create_infer_request()
            run = partial(request.infer, {0: ids.numpy()})
            name = f"openvino group {group}, {codes}, {precision}"
            answers[name] = torch.tensor(run()[0])[0, -1].float()
            sides[name] = lambda run=run: PROMPT / seconds(run)
    samples = take_turns(sides, options.rounds)
    for name, values in samples.items():
        cosine = torch.cosine_similarity(answers[name], exact, dim=0)
        print(f"{rate(name, values)}; cosine {cosine:.4f}")
    best = max(samples.keys() - ours.keys(), key=lambda name: median(samples[name]))
    for name in ours:
        print(f"    {name} / {best}: {times(samples[name], samples[best])}")


PARTS = {part.__name__: part for part in (context, batch, large, bitsandbytes, openvino)}


@torch.inference_mode()
def main() -> None:
    """Print the part asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    for name, default in (("threads", 2), ("rounds", 9), ("new-tokens", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--recipe", help="another than the usual one, of `context` and `large`")
    options = parser.parse_args()
    disable_progress_bar()
    torch.set_num_threads(options.threads)
    load = f"load average {os.getloadavg()[0]:.2f}"
    print(f"{options.part}, {native.status().isa}, {options.threads} threads, {load}")
    PARTS[options.part](options)


if __name__ == "__main__":
    main()
