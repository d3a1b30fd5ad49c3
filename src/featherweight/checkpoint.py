"""Reading one checkpoint with transformers: a folder, a hub id or a gguf file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from featherweight.errors import FeatherweightError, MissingExtraError, ModelError


class explained:
    """Turn what transformers and safetensors raise into one line that says what to do."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, Exception) or isinstance(error, FeatherweightError):
            return
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        local = Path(self.name).exists()
        if "SafetensorError" in type(error).__name__ or "safetensors" in first.lower():
            raise ModelError(
                f"the weights of '{self.name}' are truncated or damaged: {first}",
                hint="download or write them again",
            ) from None
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"'{self.name}' brings its own code, which is not run unless you ask",
                hint="read the code, then pass --trust-remote-code (trust_remote_code=True)",
            ) from None
        if isinstance(error, OSError) and not local:
            raise ModelError(
                f"no model '{self.name}': not a folder, not in the hub cache, and the hub did not"
                f" give it ({first})",
                hint="give a folder, a gguf file, or the id of a model that you can reach",
            ) from None
        raise ModelError(
            f"'{self.name}' cannot be loaded: {type(error).__name__}: {first}",
            hint="see that config.json and the weights belong together; "
            "FEATHERWEIGHT_DEBUG=1 shows the traceback",
        ) from error


def _auto_class(config: Any) -> tuple[Any, str]:
    """The transformers Auto class for a checkpoint's own architecture, and its kind."""
    import transformers as t
    from transformers.models.auto import modeling_auto as names

    architecture = (config.architectures or [""])[0]
    heads: list[tuple[Any, Any, str]] = [
        (names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, t.AutoModelForCausalLM, "decoder"),
        (
            names.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
            t.AutoModelForSequenceClassification,
            "encoder",
        ),
        (names.MODEL_FOR_MASKED_LM_MAPPING_NAMES, t.AutoModelForMaskedLM, "encoder"),
        (
            names.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
            t.AutoModelForTokenClassification,
            "encoder",
        ),
    ]
    for table, auto, kind in heads:
        if architecture in table.values():
            return auto, kind
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return t.AutoModelForCausalLM, "decoder"  # remote code, which the caller allowed
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"'{architecture}' is an encoder-decoder, which Featherweight cannot load yet",
            hint="use a decoder (…ForCausalLM) or an encoder",
        )
    return t.AutoModel, "encoder"


def read_checkpoint(
    name: str, where: str, common: dict[str, Any]
) -> tuple[Any, Any, str, list[str]]:
    """Model, tokenizer or None, kind, notes; `common` goes to every `from_pretrained`."""
    import transformers as t

    with explained(name):
        config = t.AutoConfig.from_pretrained(where, **common)
        auto, kind = _auto_class(config)
        model, info = auto.from_pretrained(where, output_loading_info=True, **common)
    missing = sorted(info["missing_keys"])
    notes = []
    if missing:
        listed = ", ".join(missing[:3]) + (" …" if len(missing) > 3 else "")
        if auto is not t.AutoModel:
            raise ModelError(
                f"'{name}' lacks {len(missing)} of the weights of {type(model).__name__}: {listed}",
                hint="the checkpoint is damaged or of another architecture; download it again",
            )
        # Headless encoders are often saved without the pooler that their class defines.
        notes.append(f"not in the checkpoint, set at random: {listed}")
    return model, _tokenizer(where, common), kind, notes


def read_gguf(path: Path) -> tuple[Any, Any, str]:
    """A gguf file as a plain float32 model: transformers has no CPU kernels for its blocks."""
    import transformers as t

    try:
        import gguf  # noqa: F401
    except ImportError:
        raise MissingExtraError("gguf", "gguf", "reading gguf files") from None
    where: dict[str, Any] = {
        "pretrained_model_name_or_path": str(path.parent),
        "gguf_file": path.name,
    }
    with explained(str(path)):
        dequantize = t.GgufConfig(dequantize=True)
        model = t.AutoModelForCausalLM.from_pretrained(**where, quantization_config=dequantize)
        tokenizer = t.AutoTokenizer.from_pretrained(**where)
    return model, tokenizer, "decoder"


def _tokenizer(where: str, common: dict[str, Any]) -> Any:
    """None for a checkpoint without a tokenizer, such as one of random weights."""
    import transformers as t

    try:
        return t.AutoTokenizer.from_pretrained(where, **common)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        folder = Path(where)
        if folder.is_dir() and not any(folder.glob("*token*")) and not any(folder.glob("vocab*")):
            return None
        raise ModelError(
            f"the tokenizer of '{where}' cannot be read",
            hint="put its tokenizer files there again, or remove them all to go without",
        ) from None
