"""Language models in the folders of transformers: loading, saving, tokens, windows of them, and loss per byte.

transformers is imported when a function here needs it. Code from a model's folder is never run.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pacprune import imports
from pacprune.data.splits import IGNORED
from pacprune.data.text import Document
from pacprune.integrations import pretrained
from pacprune.integrations.pretrained import in_one_line
from pacprune.masking import weights

END = "<|end|>"
"""The token between documents, of a tokenizer that is trained here."""
CAUSAL = "pacprune_causal"
"""The name of `causal_attention` among those of transformers."""
AT_ONCE = 2**14
"""Tokens in a batch that only measures."""
PORTION = 512
"""Documents that are made into tokens at a time."""

Windows = tuple[Tensor, Tensor]
"""Tokens (n, length), and the token after each of them."""


def package() -> Any:
    """The package transformers, which says nothing but errors."""
    transformers = imports.extra("transformers", "transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


# --- Models and tokenizers in folders.


def load_tokenizer(folder: Path, *, alone: bool = False) -> Any:
    """The tokenizer of a model's folder, or one that lies there `alone`.

    Raises:
        ValueError: If there is none, or it has no token for the end of a text.
    """
    if not alone:
        _check_folder(folder)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        raise ValueError(
            f"{folder} holds a model without a tokenizer; put the tokenizer's files into it, as "
            "tokenizer.save_pretrained does"
        )
    try:
        tokenizer = package().AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a foreign file can raise anything
        raise ValueError(f"the tokenizer in {folder} cannot be loaded ({in_one_line(error)}); save it again") from None
    end_of(tokenizer)
    return tokenizer


def load_model(
    folder: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | str = "auto", causal: bool = False
) -> Any:
    """The language model of a folder, in eval mode, as `from_pretrained` reads it.

    Args:
        folder: What save_pretrained wrote.
        device: Where it is put.
        dtype: Type of its weights; "auto" is the stored one.
        causal: Whether `causal_attention` takes the place of its own, which suits a `llama` of this file.

    Raises:
        ValueError: If there is none that transformers knows, or its files lack a tensor.
    """
    _check_folder(folder)
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False, "dtype": dtype}
    transformers = package()
    if causal:
        transformers.AttentionInterface.register(CAUSAL, causal_attention)
        options["attn_implementation"] = CAUSAL
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    except Exception as error:  # a foreign file can raise anything
        raise ValueError(
            f"the model in {folder} cannot be loaded ({in_one_line(error)}); give a folder that save_pretrained of a "
            "causal language model wrote"
        ) from None
    pretrained.check_complete(folder, model, report)
    return model.to(device).eval()


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(f"the model's folder {folder} does not exist; give one that save_pretrained wrote")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json, so no model; give a folder that save_pretrained wrote")


def size_of(folder: Path) -> int:
    """How many weights the model of a folder has; none of them is read."""
    _check_folder(folder)
    transformers = package()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:  # a foreign file can raise anything
        raise ValueError(
            f"{folder} describes no causal language model that transformers knows ({in_one_line(error)}); give a "
            "folder that save_pretrained wrote"
        ) from None
    return sum(parameter.numel() for parameter in model.parameters())


def stored_bytes(folder: Path) -> int:
    """Bytes of the weights' files in a folder."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".safetensors", ".bin"))


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on a device; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        names = getattr(os, "sysconf_names", {})
        known = "SC_AVPHYS_PAGES" in names
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if known else None


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Writes model and tokenizer as save_pretrained does, so that they load wherever transformers is."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def llama(*, vocabulary: int, length: int, end: int, seed: int, **sizes: int) -> Any:
    """A decoder from scratch, in float32: a Llama with one matrix for embedding and output.

    Args:
        vocabulary: Number of tokens.
        length: The longest window.
        end: The token between documents.
        seed: Seed of its weights.
        **sizes: hidden_size, intermediate_size, num_hidden_layers and num_attention_heads.
    """
    transformers = package()
    transformers.AttentionInterface.register(CAUSAL, causal_attention)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        max_position_embeddings=length,
        bos_token_id=end,
        eos_token_id=end,
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation=CAUSAL,
        **sizes,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return transformers.LlamaForCausalLM(config)


def causal_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention to all tokens before, without a mask: whether one is needed is a question that stops a CUDA graph.

    Padding at the end changes nothing before it. Sliding windows are not for this function.
    """
    outputs = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=options.get("scaling"))
    return outputs.transpose(1, 2).contiguous(), None


# --- What is pruned.


def block_weights(model: Any) -> list[str]:
    """The names of the weights of all linear layers but the last one, which is the vocabulary's, as embeddings are."""
    kinds = (nn.Linear, _conv1d())
    kept = {id(model.get_output_embeddings()), id(model.get_input_embeddings())}
    chosen = {id(module.weight) for module in model.modules() if isinstance(module, kinds) and id(module) not in kept}
    return [name for name, weight in weights.all_weights(model).items() if id(weight) in chosen]


def _conv1d() -> Any:
    return imports.function("transformers.pytorch_utils:Conv1D")


@contextmanager
def as_linear(model: Any) -> Iterator[None]:
    """While this lasts, GPT-2's Conv1D layers, whose weights are [in, out], are Linear ones of the same names.

    Scores and N:M patterns go along the inputs of a layer, which are the rows' second dimension of a Linear layer.
    """
    places: dict[str, Any] = {name: layer for name, layer in model.named_modules() if isinstance(layer, _conv1d())}
    for name, layer in places.items():
        linear = nn.Linear(layer.nx, layer.nf, device="meta")
        linear.weight, linear.bias = nn.Parameter(layer.weight.data.t().contiguous()), layer.bias
        linear.train(layer.training)
        model.set_submodule(name, linear)
    try:
        yield
    finally:
        for name, layer in places.items():
            linear = model.get_submodule(name)
            layer.weight, layer.bias = nn.Parameter(linear.weight.data.t().contiguous()), linear.bias
            model.set_submodule(name, layer)


# --- Tokens.


def train_tokenizer(documents: Sequence[Document], *, size: int) -> Any:
    """A byte-pair tokenizer of these documents: any text is some tokens, and the tokens are the text again.

    It follows from the documents and the size alone.

    Args:
        documents: Texts to count pairs in.
        size: Number of tokens, with the 256 bytes and END among them.

    Returns:
        A tokenizer of transformers, which save_pretrained writes and AutoTokenizer reads.
    """
    tokenizers = imports.extra("tokenizers", "transformers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    fast = package().PreTrainedTokenizerFast
    return fast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END)


def end_of(tokenizer: Any) -> int:
    """The token that stands between documents."""
    for token in (tokenizer.eos_token_id, tokenizer.bos_token_id):
        if token is not None:
            return int(token)
    raise ValueError("the tokenizer has no token for the end of a text; set its eos_token, and save it again")


def tokens_of(tokenizer: Any, documents: Sequence[Document]) -> list[np.ndarray]:
    """The tokens of every document, without special ones, as int32."""
    tokens: list[np.ndarray] = []
    for start in range(0, len(documents), PORTION):
        texts = [document.text for document in documents[start : start + PORTION]]
        encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        tokens += [np.asarray(numbers, np.int32) for numbers in encoded]
    return tokens


def packed(tokens: Sequence[np.ndarray], *, end: int, length: int) -> Windows:
    """Windows to train and to score on: documents behind one another with `end` between them, cut without a rest.

    A window may hold the end of one document and the beginning of the next. Nothing is padded, and at most the last
    `length` tokens are left out.
    """
    line = np.full(sum(len(document) + 1 for document in tokens) + 1, end, np.int32)
    place = 1  # the first document begins behind an end, too
    for document in tokens:
        line[place : place + len(document)] = document
        place += len(document) + 1
    count = (len(line) - 1) // length
    x, y = (line[start : start + count * length].reshape(count, length) for start in (0, 1))
    return torch.from_numpy(x).long(), torch.from_numpy(y).long()


def sizes_of(documents: Sequence[Document]) -> Tensor:
    """The bytes of every document in UTF-8."""
    return torch.tensor([len(document.text.encode()) for document in documents])


class HeldOut(NamedTuple):
    """Documents to measure on: every one of their tokens is predicted once, in windows that hold no other document.

    Args:
        x: Tokens (n, length); what is behind a document's end is padding.
        y: The token after each, IGNORED where there is none.
        document: The number of the document of every window.
        bytes: The bytes of every document in UTF-8.
    """

    x: Tensor
    y: Tensor
    document: Tensor
    bytes: Tensor


def held_out(tokens: Sequence[np.ndarray], sizes: Tensor, *, end: int, length: int) -> HeldOut:
    """Windows that begin with `end`, or with the last token of the window before, and cover every document.

    Args:
        tokens: Of every document.
        sizes: Bytes of every document.
        end: The token between documents.
        length: Tokens of a window.
    """
    counts = [-(-len(document) // length) for document in tokens]
    x = np.full((sum(counts), length), end, np.int64)
    y = np.full((sum(counts), length), IGNORED, np.int64)
    row = 0
    for document in tokens:
        line = np.concatenate([[end], document])
        for start in range(0, len(document), length):
            piece = line[start : start + length + 1]
            x[row, : len(piece) - 1], y[row, : len(piece) - 1] = piece[:-1], piece[1:]
            row += 1
    owners = torch.arange(len(tokens)).repeat_interleave(torch.tensor(counts, dtype=torch.int64))
    return HeldOut(torch.from_numpy(x), torch.from_numpy(y), owners, sizes)


# --- Losses.


def next_token(output: Any, y: Tensor) -> Tensor:
    """The mean loss of predicting the tokens of y, in nats, from a model's output with logits."""
    return F.cross_entropy(output.logits.flatten(0, 1).float(), y.flatten(), ignore_index=IGNORED)


class Losses(NamedTuple):
    """The loss on held-out documents, in nats: of every document, and how many tokens and bytes each has."""

    total: Tensor
    tokens: Tensor
    bytes: Tensor

    @property
    def per_token(self) -> float:
        """The mean over all tokens, which no other tokenizer's can be compared with."""
        return float(self.total.sum() / self.tokens.sum())

    @property
    def per_byte(self) -> float:
        """The sum over all bytes, whatever tokens they were cut into."""
        return float(self.total.sum() / self.bytes.sum())


@torch.no_grad()
def losses(model: nn.Module, documents: HeldOut, *, amp: bool = False) -> Losses:
    """The loss on every held-out document; with `amp`, in bfloat16 but for the loss itself."""
    device = next(model.parameters()).device
    total = torch.zeros(len(documents.bytes), dtype=torch.float64)
    tokens = torch.zeros(len(documents.bytes), dtype=torch.int64)
    size = max(1, AT_ONCE // documents.x.shape[1])
    with weights.modes_kept(model):
        model.eval()
        for start in range(0, len(documents.x), size):
            x, y, owner = (part[start : start + size] for part in documents[:3])
            y = y.to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                logits = model(x.to(device)).logits
            each = F.cross_entropy(logits.transpose(1, 2).float(), y, reduction="none", ignore_index=IGNORED)
            total.index_add_(0, owner, each.double().sum(1).cpu())
            tokens.index_add_(0, owner, (y != IGNORED).sum(1).cpu())
    return Losses(total, tokens, documents.bytes)
