"""The configs of well-known models, carried along: to predict what one needs, no network is asked.

A file in `configs/` holds what the model's config.json on the hub says, as far as it shapes the
model, in keys that transformers 4.40 reads as well as today's. That one rejects Llama 3's
`rope_scaling`, so there it stands under its new name, `rope_parameters`, which 4.40 ignores.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from pathlib import Path
from typing import Any

from featherweight.errors import MissingExtraError, ModelError

CONFIGS = Path(__file__).parent / "configs"

# Short name, which is also the stem of its file: the hub ids that have this very config.
KNOWN: dict[str, tuple[str, ...]] = {
    "bert-base": ("bert-base-uncased", "google-bert/bert-base-uncased"),
    "bert-large": ("bert-large-uncased", "google-bert/bert-large-uncased"),
    "albert-base": ("albert-base-v2", "albert/albert-base-v2"),
    "distilbert": ("distilbert-base-uncased", "distilbert/distilbert-base-uncased"),
    "roberta-base": ("FacebookAI/roberta-base",),
    "minilm-l6": (
        "sentence-transformers/all-MiniLM-L6-v2",
        "nreimers/MiniLM-L6-H384-uncased",
    ),
    "gpt2": ("openai-community/gpt2",),
    "gpt2-medium": ("openai-community/gpt2-medium",),
    "gpt2-large": ("openai-community/gpt2-large",),
    "gpt2-xl": ("openai-community/gpt2-xl",),
    "pythia-410m": ("EleutherAI/pythia-410m", "EleutherAI/pythia-410m-deduped"),
    "opt-350m": ("facebook/opt-350m",),
    "llama-2-7b": ("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-7b-chat-hf"),
    "llama-2-13b": ("meta-llama/Llama-2-13b-hf", "meta-llama/Llama-2-13b-chat-hf"),
    "llama-2-70b": ("meta-llama/Llama-2-70b-hf", "meta-llama/Llama-2-70b-chat-hf"),
    "llama-3.1-8b": (
        "meta-llama/Llama-3.1-8B",
        "meta-llama/Llama-3.1-8B-Instruct",
        "meta-llama/Meta-Llama-3.1-8B",
        "meta-llama/Meta-Llama-3.1-8B-Instruct",
    ),
    "llama-3.1-70b": (
        "meta-llama/Llama-3.1-70B",
        "meta-llama/Llama-3.1-70B-Instruct",
        "meta-llama/Meta-Llama-3.1-70B",
        "meta-llama/Meta-Llama-3.1-70B-Instruct",
    ),
    "llama-3.2-1b": ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B-Instruct"),
    "llama-3.2-3b": ("meta-llama/Llama-3.2-3B", "meta-llama/Llama-3.2-3B-Instruct"),
    "tinyllama-1.1b": ("TinyLlama/TinyLlama-1.1B-Chat-v1.0",),
    "smollm2-135m": ("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M-Instruct"),
    "smollm2-360m": ("HuggingFaceTB/SmolLM2-360M", "HuggingFaceTB/SmolLM2-360M-Instruct"),
    "smollm2-1.7b": ("HuggingFaceTB/SmolLM2-1.7B", "HuggingFaceTB/SmolLM2-1.7B-Instruct"),
    # v0.1, which attends to the last 4096 tokens; v0.2 and later attend to all.
    "mistral-7b": ("mistralai/Mistral-7B-v0.1", "mistralai/Mistral-7B-Instruct-v0.1"),
    "mixtral-8x7b": ("mistralai/Mixtral-8x7B-v0.1", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
    "qwen2.5-0.5b": ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B-Instruct"),
    "qwen2.5-1.5b": ("Qwen/Qwen2.5-1.5B",),
    "qwen2.5-3b": ("Qwen/Qwen2.5-3B", "Qwen/Qwen2.5-3B-Instruct"),
    "qwen2.5-7b": ("Qwen/Qwen2.5-7B",),
    "qwen2.5-14b": ("Qwen/Qwen2.5-14B",),
    "qwen2.5-32b": ("Qwen/Qwen2.5-32B",),
    "qwen2.5-72b": ("Qwen/Qwen2.5-72B",),
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B",),
    "qwen3-1.7b": ("Qwen/Qwen3-1.7B",),
    "qwen3-4b": ("Qwen/Qwen3-4B",),
    "qwen3-8b": ("Qwen/Qwen3-8B",),
    "qwen3-14b": ("Qwen/Qwen3-14B",),
    "qwen3-32b": ("Qwen/Qwen3-32B",),
    "qwen3-30b-a3b": ("Qwen/Qwen3-30B-A3B",),
    "gemma-2-2b": ("google/gemma-2-2b",),
    "gemma-2-9b": ("google/gemma-2-9b",),
    "gemma-2-27b": ("google/gemma-2-27b",),
    "gemma-3-270m": ("google/gemma-3-270m", "google/gemma-3-270m-it"),
    "gemma-3-1b": ("google/gemma-3-1b-pt", "google/gemma-3-1b-it"),
    # With the vision tower, as published.
    "gemma-3-4b": ("google/gemma-3-4b-pt", "google/gemma-3-4b-it"),
    "gemma-3-12b": ("google/gemma-3-12b-pt", "google/gemma-3-12b-it"),
    "gemma-3-27b": ("google/gemma-3-27b-pt", "google/gemma-3-27b-it"),
    "phi-1.5": ("microsoft/phi-1_5",),
    "phi-3-mini": ("microsoft/Phi-3-mini-4k-instruct",),
    "falcon-7b": ("tiiuae/falcon-7b", "tiiuae/falcon-7b-instruct"),
    "falcon-40b": ("tiiuae/falcon-40b", "tiiuae/falcon-40b-instruct"),
    "octocoder": ("bigcode/octocoder",),
    "bloom-176b": ("bigscience/bloom",),
    "t5-3b": ("google-t5/t5-3b",),
    "t5-11b": ("google-t5/t5-11b",),
    "whisper-large": ("openai/whisper-large", "openai/whisper-large-v2"),
}

# Hub ids whose config differs from a known one in a few keys.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm2-135m": ("smollm2-135m", {"dtype": "float32"}),  # as `load` has it, out of a gguf file
    "bert-base-cased": ("bert-base", {"vocab_size": 28996}),
    "google-bert/bert-base-cased": ("bert-base", {"vocab_size": 28996}),
    "bert-large-cased": ("bert-large", {"vocab_size": 28996}),
    "google-bert/bert-large-cased": ("bert-large", {"vocab_size": 28996}),
    "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T": (
        "tinyllama-1.1b",
        {"dtype": "float32"},
    ),
    "google/gemma-2-2b-it": ("gemma-2-2b", {"dtype": "bfloat16"}),
    "google/gemma-2-9b-it": ("gemma-2-9b", {"dtype": "bfloat16"}),
    "google/gemma-2-27b-it": ("gemma-2-27b", {"dtype": "bfloat16"}),
    **{
        f"Qwen/Qwen2.5-{size}-Instruct": (
            f"qwen2.5-{size.lower()}",
            {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6},
        )
        for size in ("1.5B", "7B", "14B", "32B", "72B")
    },
    **{
        f"Qwen/Qwen3-{size}-Base": (f"qwen3-{size.lower()}", {"max_position_embeddings": 32768})
        for size in ("0.6B", "1.7B", "4B", "8B", "14B", "30B-A3B")
    },
}

_INDEX: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in KNOWN},
    **{hub_id.lower(): (name, {}) for name, ids in KNOWN.items() for hub_id in ids},
    **{hub_id.lower(): variant for hub_id, variant in VARIANTS.items()},
}


def names() -> list[str]:
    """The short names of the models whose configs are carried along."""
    return list(KNOWN)


def config_dict(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> dict[str, Any]:
    """What the config.json of a model says; weights are neither needed nor downloaded.

    Args:
        name: a folder that holds config.json, a gguf file, a short name or hub id of `KNOWN`, for
            which no network is asked, or any other hub id. Case does not matter in known ones.
        revision: branch, tag or commit of a hub id; such a config always comes from the hub.
        trust_remote_code: accept a config that only code which comes with it can read.

    Raises:
        ModelError if there is no such config, it cannot be read, or it needs code.
    """
    path = Path(name).expanduser()
    if (path / "config.json").is_file():
        return _read(path / "config.json", name, trust_remote_code)
    if path.is_file():
        return _of_gguf(path)
    if revision is None and name.lower() in _INDEX:
        stem, changes = _INDEX[name.lower()]
        return json.loads((CONFIGS / f"{stem}.json").read_text("utf-8")) | changes
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        if len(found) == 1:
            return _of_gguf(found[0])
        listed = f"it has {len(found)} gguf files: name one" if found else "it has no config.json"
        raise ModelError(f"'{name}' is a folder that holds no single model", hint=listed)
    looks_local = path.is_absolute() or name.startswith((".", "~")) or path.suffix == ".gguf"
    if looks_local or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise ModelError(f"no file or folder '{name}'", hint=_nearest(name))
    return _read(_download(name, revision), name, trust_remote_code)


def _of_gguf(path: Path) -> dict[str, Any]:
    """The config of the float32 model as which `load` reads a gguf file."""
    if path.suffix != ".gguf":
        raise ModelError(
            f"'{path}' is a file, but not a gguf file",
            hint="name a gguf file, or the folder that holds config.json",
        )
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise MissingExtraError("gguf", "gguf", "reading gguf files") from None
    from featherweight.checkpoint import explained

    with explained(str(path)):
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        config = load_gguf_checkpoint(os.fspath(path), return_tensors=False)["config"]
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]
    return {**config, "architectures": [architecture], "dtype": "float32"}


def _download(name: str, revision: str | None) -> Path:
    """config.json alone of a hub id, downloaded unless it is in the hub's cache."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json", revision=revision))
    except Exception as error:  # its errors have no base in common
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        at = f" at revision '{revision}'" if revision else ""
        raise ModelError(
            f"no config of '{name}'{at}: not a folder, not a known name, not in the hub cache, and"
            f" the hub did not give it ({type(error).__name__}: {first})",
            hint=_nearest(name),
        ) from None


def _nearest(name: str) -> str:
    """What to do about a name that there is not."""
    spelled = {known.lower(): known for ids in (*KNOWN.values(), KNOWN, VARIANTS) for known in ids}
    wanted = name.lower()
    near = difflib.get_close_matches(wanted, spelled)
    near = near or difflib.get_close_matches(wanted.rpartition("/")[2], spelled)
    if near:
        return f"nearest known names: {', '.join(spelled[known] for known in near)}"
    return "give a folder that holds config.json, a hub id, or a known name such as 'llama-2-7b'"


def _read(path: Path, name: str, trust_remote_code: bool) -> dict[str, Any]:
    """A config.json, seen to be one that can be used."""
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"the config.json of '{name}' cannot be read: {error}",
            hint="see that it is the JSON file that belongs to the model, or get it again",
        ) from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        said = "has no model_type" if isinstance(config, dict) else "is not a JSON object"
        raise ModelError(
            f"the config.json of '{name}' {said}",
            hint="it must be one that transformers reads: an object that names a model_type",
        )
    code = config.get("auto_map")
    if not trust_remote_code and isinstance(code, dict) and "AutoConfig" in code:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        if config["model_type"] not in CONFIG_MAPPING:
            raise ModelError(
                f"'{name}' is a '{config['model_type']}', which only the code that it brings can"
                " read, and that is not run unless you ask",
                hint="read the code, then pass --trust-remote-code (trust_remote_code=True)",
            )
    return config
