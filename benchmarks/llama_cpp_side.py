"""llama.cpp as the other side of a benchmark: its files, and a process that runs it.

It runs in a process of its own, started with any Python that has `llama-cpp-python`, and answers
one request a line. Between requests it waits for its standard input.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# llama_ftype. Whole models in one format but for embeddings and head, see `Runner.quantise`.
FORMATS = {"Q4_0": 2, "IQ4_NL": 25, "Q8_0": 7, "F16": 1, "BF16": 32}
QUANTISED = {"Q4_0", "IQ4_NL", "Q8_0"}
GGML_Q8_0 = 8
LEAST_SECONDS = 0.4  # as featherweight.measure.clock
GRAIN = 256  # tokens: what llama.cpp rounds its cache up to


class LlamaCpp:
    """The process, seen from outside: `side("prefill", name="Q4_0", ids=[...])`."""

    def __init__(self, python: str, threads: int) -> None:
        command = [python, str(Path(__file__).resolve()), str(threads)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        hello = self._answer()
        if "missing" in hello:
            raise SystemExit(
                f"llama-cpp-python is missing ({hello['missing']}): run"
                f" 'CMAKE_ARGS=-DGGML_NATIVE=ON {python} -m pip install llama-cpp-python', which"
                " compiles llama.cpp for this machine, or name a Python that has it with --python"
            )
        self.version, self.system = hello["version"], hello["system"]

    def __call__(self, what: str, **given: Any) -> Any:
        """Have a method of `Runner` called, and wait for what it returns."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"what": what, "given": given}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def cpu_seconds(self) -> float:
        """Of all its threads since it began."""
        import psutil

        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

    def _answer(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"llama.cpp's process has ended with {self._process.wait()}")
        return json.loads(line)


def files(side: LlamaCpp, folder: Path, kinds: list[str], read: Callable[[], Any]) -> list[Path]:
    """A gguf file of each kind in `folder`; those that are not there are made of `read()`'s model.

    The float32 file from which llama.cpp makes them is not kept.
    """
    found = [folder / f"{kind}.gguf" for kind in kinds]
    missing = [path for path in found if not path.is_file()]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        source = folder / ".float32.gguf"
        write_gguf(read(), source)
        for path in missing:
            print(f"writing {path}", flush=True)
            fresh = path.with_suffix(".new")
            side("quantise", source=str(source), target=str(fresh), kind=path.stem)
            fresh.replace(path)
        source.unlink()
    return found


def write_gguf(model: Any, path: Path) -> None:
    """A float32 Llama of transformers as a gguf file without a vocabulary."""
    try:
        import gguf
    except ImportError:
        raise SystemExit(f"gguf is missing: run '{sys.executable} -m pip install gguf'") from None
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(model.model.layers[0].self_attn.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.named_parameters():  # a tied head is left out, as llama.cpp has it
        count = heads.get(name.split(".")[-2])
        if count:  # llama.cpp turns neighbours, transformers the two halves of a head
            weight = weight.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
        to = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(to, weight.detach().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Runner:
    """llama.cpp, seen from inside its process, by its C interface."""

    def __init__(self, lib: Any, threads: int) -> None:
        self.lib, self.threads = lib, threads
        self.quiet = lib.llama_log_callback(lambda level, text, data: None)  # must stay alive
        lib.llama_log_set(self.quiet, None)
        lib.llama_backend_init()
        self.contexts: dict[str, Any] = {}
        self.vocabulary = 0

    def quantise(self, source: str, target: str, kind: str) -> None:
        """All products in one format, embeddings and head in Q8_0, as `head=int8` has them."""
        wish = self.lib.llama_model_quantize_default_params()
        _set(wish, ftype=FORMATS[kind], nthread=self.threads)
        if kind in QUANTISED:
            head = {"output_tensor_type": GGML_Q8_0, "token_embedding_type": GGML_Q8_0}
            _set(wish, pure=True, **head)
        if self.lib.llama_model_quantize(source.encode(), target.encode(), wish):
            raise RuntimeError(f"llama.cpp could not quantise {source} to {kind}")

    def load(self, name: str, path: str, tokens: int) -> int:
        """A model with room for `tokens`; returns the bytes of its weights."""
        defaults = self.lib.llama_model_default_params()
        model = self.lib.llama_model_load_from_file(path.encode(), defaults)
        if not model:
            raise RuntimeError(f"llama.cpp could not load {path}")
        room = self.lib.llama_context_default_params()
        _set(room, n_ctx=-(-tokens // GRAIN) * GRAIN, n_batch=512, n_ubatch=512, no_perf=False)
        _set(room, n_threads=self.threads, n_threads_batch=self.threads)
        self.contexts[name] = self.lib.llama_init_from_model(model, room)
        self.vocabulary = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(model))
        return self.lib.llama_model_size(model)

    def prefill(self, name: str, ids: list[int]) -> float:
        """Seconds for the prompt; the mean of several times where that is short."""
        context, prompt = self.contexts[name], _tokens(self.lib, ids)
        start = time.perf_counter()
        for times in range(1, 100):  # noqa: B007  # as often as makes a sample of some length
            self._clear(context)
            self._decode(context, prompt)
            if time.perf_counter() - start > LEAST_SECONDS:
                break
        return (time.perf_counter() - start) / times

    def generate(self, name: str, ids: list[int], new_tokens: int) -> dict[str, Any]:
        """Greedy: seconds from the first new token to the last, also by llama.cpp's own clock."""
        context, one = self.contexts[name], _tokens(self.lib, [0])
        self._clear(context)
        written = [int(self._decode(context, _tokens(self.lib, ids)).argmax())]
        self.lib.llama_perf_context_reset(context)
        start = time.perf_counter()
        while len(written) < new_tokens:
            one[0] = written[-1]
            written.append(int(self._decode(context, one).argmax()))
        seconds = time.perf_counter() - start
        own = self.lib.llama_perf_context(context)
        return {"seconds": seconds, "own": own.t_eval_ms / 1e3, "written": written}

    def logits(self, name: str, ids: list[int]) -> list[float]:
        """Of the last token, [V]."""
        self._clear(self.contexts[name])
        return self._decode(self.contexts[name], _tokens(self.lib, ids)).tolist()

    def _clear(self, context: Any) -> None:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(context), False)

    def _decode(self, context: Any, ids: Any) -> Any:
        """Logits of the last token, [V], where llama.cpp has them."""
        import numpy as np

        if self.lib.llama_decode(context, self.lib.llama_batch_get_one(ids, len(ids))):
            raise RuntimeError(f"llama.cpp could not process {len(ids)} tokens")
        return np.ctypeslib.as_array(
            self.lib.llama_get_logits_ith(context, -1), shape=(self.vocabulary,)
        )


def _set(struct: Any, **values: Any) -> None:
    """Fields of a C struct, which would take any other name without a word."""
    unknown = values.keys() - {name for name, _ in struct._fields_}
    if unknown:
        raise AttributeError(f"this llama.cpp has no {', '.join(sorted(unknown))}")
    for name, value in values.items():
        setattr(struct, name, value)


def _tokens(lib: Any, ids: list[int]) -> Any:
    return (lib.llama_token * len(ids))(*ids)


def serve(threads: int) -> None:
    """Answer requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that a library prints gets between the answers

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        package = importlib.import_module("llama_cpp")
    except (ImportError, OSError, RuntimeError) as error:  # the last two: a broken library
        return answer({"missing": str(error)})
    lib = package.llama_cpp
    runner = Runner(lib, threads)
    system = ctypes.string_at(lib.llama_print_system_info()).decode()
    answer({"version": package.__version__, "system": system})
    for line in sys.stdin:
        request = json.loads(line)
        answer(getattr(runner, request["what"])(**request["given"]))
    return None


if __name__ == "__main__":
    serve(int(sys.argv[1]))
