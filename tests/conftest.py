"""Small models of random weights, built once a run, and the real one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks the hub; set before it is imported


def save_tokenizer(folder: Path) -> None:
    """A byte-level BPE of 384 tokens, trained on a page of CPython's help."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([topics["assignment"]], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(folder)


def save_model(folder: Path, model: Any) -> Path:
    """The folder that `load` reads, tokenizer included."""
    model.eval().save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def tiny_llama_config(**changes: Any) -> Any:
    """Two layers of grouped-query attention, 64 wide: sizes that every kernel can tile."""
    from transformers import LlamaConfig

    sizes = {
        "vocab_size": 384,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "initializer_range": 0.2,  # large enough for attention to matter
    }
    return LlamaConfig(**(sizes | changes))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a Llama of 100,000 random weights, float32, tied head."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    return save_model(tmp_path_factory.mktemp("llama"), LlamaForCausalLM(tiny_llama_config()))


@pytest.fixture(scope="session")
def tiny_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a GPT-2: Conv1D instead of Linear, biases, learned positions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=384, n_embd=64, n_layer=2, n_head=4, n_positions=256, initializer_range=0.2
    )
    return save_model(tmp_path_factory.mktemp("gpt2"), GPT2LMHeadModel(config))


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a BERT encoder."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=384,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    return save_model(tmp_path_factory.mktemp("bert"), BertModel(config))


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The real model by name; downloaded into the user's cache the first time."""
    from featherweight.models import load

    load("smollm2-135m")
    return "smollm2-135m"


@pytest.fixture(scope="session", params=["llama", "gpt2", "bert"])
def tiny(request: pytest.FixtureRequest) -> Path:
    """Each of the tiny models in turn."""
    folder: Path = request.getfixturevalue(f"tiny_{request.param}")
    return folder


def read(folder: Path | str, **options: Any) -> Any:
    """The model of a folder as transformers gives it, its weights views of the mapped file."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    writes = config.architectures[0].endswith(("ForCausalLM", "LMHeadModel"))
    auto = AutoModelForCausalLM if writes else AutoModel
    return auto.from_pretrained(folder, **options).eval()


@pytest.fixture(name="read", scope="session")
def read_fixture() -> Callable[..., Any]:
    """`read(folder, **options)`: a fresh model from a folder."""
    return read


@torch.no_grad()
def answer(model: Any) -> torch.Tensor:
    """What the model says to a batch of three lengths, padded on the right: real tokens only."""
    ids = torch.arange(3 * 12).reshape(3, 12) * 7 % 384
    mask = (torch.arange(12) < torch.tensor([12, 7, 3])[:, None]).long()
    out = model(input_ids=ids, attention_mask=mask)
    return (out.logits if "logits" in out else out.last_hidden_state)[mask.bool()]


@pytest.fixture(name="answer", scope="session")
def answer_fixture() -> Callable[[Any], torch.Tensor]:
    """`answer(model)`: outputs of a small padded batch."""
    return answer


class State:
    """Everything of a model that undo must bring back; `==` compares objects and bits."""

    def __init__(self, model: Any) -> None:
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.training = {name: module.training for name, module in self.modules.items()}
        self.vars = {name: set(vars(module)) for name, module in self.modules.items()}
        self.tensors = {
            name: (tensor, tensor.detach().clone(), tensor.requires_grad)
            for name, tensor in (
                *model.named_parameters(remove_duplicate=False),
                *model.named_buffers(remove_duplicate=False),
            )
        }
        config = getattr(model, "config", None)
        self.config = dict(vars(config)) if config is not None else {}
        self.answer = answer(model) if config is not None else None

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, State)
        assert list(self.modules) == list(other.modules)
        assert all(self.modules[name] is other.modules[name] for name in self.modules)
        assert self.training == other.training
        assert self.vars == other.vars
        assert list(self.tensors) == list(other.tensors)
        for name, (tensor, value, requires_grad) in self.tensors.items():
            again, now, requires_now = other.tensors[name]
            assert tensor is again, name
            assert (now.dtype, requires_now) == (value.dtype, requires_grad), name
            assert torch.equal(value, now), name
        assert self.config == other.config
        assert self.answer is None or torch.equal(self.answer, other.answer)
        return True

    __hash__ = None  # type: ignore[assignment]


@pytest.fixture(scope="session")
def state() -> type[State]:
    """`state(model)`: a record to compare with one made later."""
    return State


@pytest.fixture(scope="session")
def resident() -> Callable[[str], int]:
    """`resident("RssFile")`: a line of this process' memory account, in bytes."""

    def line(name: str) -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split(f"{name}:")[1].split()[0]) * 1024

    return line


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., Any]:
    """`tiny_config(**changes)`: the config of `tiny_llama` with changes."""
    return tiny_llama_config


def write_gguf(path: Path, folder: Path, leave_out: str = "") -> Path:
    """A Llama's folder as a gguf file of float32 tensors, tokenizer included."""
    gguf = pytest.importorskip("gguf")
    model = read(folder)
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocabulary["vocab"], key=vocabulary["vocab"].get))
    writer.add_token_types([3, 3] + [1] * (config.vocab_size - 2))  # two control tokens first
    writer.add_token_merges([" ".join(pair) for pair in vocabulary["merges"]])
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.named_parameters():
        if name == leave_out:
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        if name.split(".")[-2] in heads:  # llama.cpp interleaves the halves that rotate together
            weight = weight.unflatten(0, (heads[name.split(".")[-2]], 2, -1)).transpose(1, 2)
            weight = weight.flatten(0, 2)
        to = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(to, weight.detach().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(name="write_gguf", scope="session")
def write_gguf_fixture() -> Callable[..., Path]:
    """`write_gguf(path, folder, leave_out=…)`: a gguf file that may lack a weight."""
    return write_gguf


@pytest.fixture(scope="session")
def tiny_gguf(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_llama` as a gguf file."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_llama)
