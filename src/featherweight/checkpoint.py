"""Reading one checkpoint with transformers: a folder or a gguf file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featherweight.errors import (
    FeatherweightError,
    MissingExtraError,
    ModelError,
    UnsupportedError,
)
from featherweight.stored import Entry, entries, files_of

if TYPE_CHECKING:
    from featherweight.recipe import Recipe

# Weights that are not there or do not fit are for `_judge` to find, not for transformers to raise.
_TELL: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}


TOKENIZER_FILES = ("*token*", "vocab*", "*.model", "merges.txt")


class explained:
    """Turn what transformers and safetensors raise into one line that says what to do."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, Exception) or isinstance(error, FeatherweightError):
            return
        first = _first_line(error)
        if isinstance(error, OSError) and "no file named" in first:
            raise ModelError(
                f"'{self.name}' holds no weights in safetensors files",
                hint="pickled weights (pytorch_model.bin) are never read: save them again as"
                " safetensors",
            ) from None
        if "SafetensorError" in type(error).__name__:
            raise ModelError(
                f"the weights of '{self.name}' are truncated or damaged: {first}",
                hint="download or write them again",
            ) from None
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"'{self.name}' brings its own code, which is not run unless you ask",
                hint="read the code, then pass --trust-remote-code (trust_remote_code=True)",
            ) from None
        raise ModelError(
            f"'{self.name}' cannot be loaded: {type(error).__name__}: {first}",
            hint="see that config.json and the weights belong together; "
            "FEATHERWEIGHT_DEBUG=1 shows the traceback",
        ) from error


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def _auto_class(config: Any) -> tuple[Any, str]:
    """The transformers Auto class for a checkpoint's own architecture, and its kind."""
    import transformers as t
    from transformers.models.auto import modeling_auto as names

    architecture = (config.architectures or [""])[0]
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"'{architecture}' is an encoder-decoder, which Featherweight cannot load yet",
            hint="use a decoder (…ForCausalLM) or an encoder",
        )
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
        (names.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES, t.AutoModelForTextEncoding, "encoder"),
    ]
    for table, auto, kind in heads:
        if architecture in table.values():
            return auto, kind
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return t.AutoModelForCausalLM, "decoder"  # remote code, which the caller allowed
    return t.AutoModel, "encoder"


def read_checkpoint(
    name: str, where: str, trust_remote_code: bool, recipe: Recipe | None = None, **placing: Any
) -> tuple[Any, Any, str, list[str]]:
    """Model, tokenizer or None, kind and notes of the checkpoint in the folder `where`.

    With a recipe, weights are quantised while they are read. Layers that bitsandbytes has
    quantised become ours. `placing` is `device_map`, `max_memory`, `offload_folder`.
    """
    import transformers as t

    common: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    options: dict[str, Any] = {"use_safetensors": True, **_TELL, **common, **placing}
    notes = []
    with explained(name):
        config = t.AutoConfig.from_pretrained(where, **common)
        auto, kind = _auto_class(config)
        there = entries(Path(where).glob("*.safetensors"))
        stored = _bitsandbytes(config)
        if stored is not None:
            from featherweight.integrations.transformers import METHOD

            if recipe is not None:
                raise UnsupportedError(
                    f"'{name}' is quantised already, by bitsandbytes, and cannot become '{recipe}'",
                    hint="load it without a recipe, or start from a checkpoint that is not",
                )
            config.quantization_config = {"quant_method": METHOD, "stored": stored}
            notes.append("weights quantised by bitsandbytes, multiplied by Featherweight's kernels")
        elif recipe is not None:
            from featherweight.integrations.transformers import QuantConfig

            options["quantization_config"] = QuantConfig(recipe)
        model, info = auto.from_pretrained(where, config=config, **options)
    notes += _judge(name, model, info, there)
    return model, _tokenizer(where, common), kind, notes


def _bitsandbytes(config: Any) -> dict[str, Any] | None:
    """The config with which bitsandbytes has quantised the checkpoint, if it has."""
    for part in (config, config.get_text_config()):
        found = getattr(part, "quantization_config", None)
        if isinstance(found, dict) and found.get("quant_method", "bitsandbytes") == "bitsandbytes":
            return found
    return None


def _judge(
    name: str, model: Any, info: dict[str, Any], there: Mapping[str, Entry] | None = None
) -> list[str]:
    """Notes on weights that are set at random; ModelError if the model needs them."""
    random = sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])})
    # Headless encoders are often saved without the pooler that their class defines.
    needed = [key for key in random if "pooler" not in key.split(".")]
    if needed:
        listed = ", ".join(needed[:3]) + (" …" if len(needed) > 3 else "")
        files = files_of(needed, there or {})
        listed += f" (in {files})" if files else ""
        raise ModelError(
            f"'{name}' lacks {len(needed)} of the weights of {type(model).__name__}, or has them in"
            f" another shape: {listed}",
            hint="the checkpoint is damaged or of another architecture; download it again",
        )
    return [f"not in the checkpoint, set at random: {', '.join(random)}"] if random else []


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
        told: Any = t.AutoModelForCausalLM.from_pretrained(
            **where, quantization_config=dequantize, **_TELL
        )
        model, info = told
        tokenizer = t.AutoTokenizer.from_pretrained(**where)
    _judge(str(path), model, info)
    return model, tokenizer, "decoder"


def _tokenizer(where: str, common: dict[str, Any]) -> Any:
    """None for a checkpoint without a tokenizer, such as one of random weights."""
    import transformers as t

    # Looked for first: some tokenizer classes make themselves up without any file.
    if not any(file for part in TOKENIZER_FILES for file in Path(where).glob(part)):
        return None
    try:
        return t.AutoTokenizer.from_pretrained(where, **common)
    except Exception as error:  # tokenizers raises nothing narrower
        raise ModelError(
            f"the tokenizer of '{where}' cannot be read: {_first_line(error)}",
            hint="put its tokenizer files there again, or remove them all to go without",
        ) from None
