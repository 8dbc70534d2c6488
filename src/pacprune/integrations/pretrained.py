"""Networks in folders that `save_pretrained` of transformers wrote: loaded whole, and checked to be.

transformers is imported when a function here needs it. Code that lies in such a folder is never run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pacprune.imports import extra

CONFIG = "config.json"
TOKENS, MASK = "input_ids", "attention_mask"
"""What text models call their inputs: tokens, and which of them are no padding."""


def is_folder(folder: Path) -> bool:
    """Whether a folder holds such a network."""
    return (folder / CONFIG).is_file()


def load(folder: Path) -> Any:
    """The network of a folder, in eval mode, of the class that its config names.

    Raises:
        ValueError: If transformers is not installed or cannot read the folder, or the files lack a tensor: a network
            that begins anew there would be another one.
    """
    transformers = extra("transformers", "transformers")
    if not is_folder(folder):
        raise ValueError(f"{folder} holds no {CONFIG}; name a folder that save_pretrained wrote")
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        with _quiet(transformers):
            config = transformers.AutoConfig.from_pretrained(folder, **options)
            kind = getattr(transformers, (config.architectures or [""])[0], None)
            if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
                raise ValueError(f"{CONFIG} names no architecture that transformers has, but {config.architectures}")
            model, report = kind.from_pretrained(
                folder, config=config, dtype="auto", output_loading_info=True, **options
            )
    except Exception as error:  # a foreign folder may make transformers raise anything
        reason = in_one_line(error)
        raise ValueError(
            f"{folder} cannot be read by transformers {transformers.__version__} ({type(error).__name__}: {reason}); "
            "write it again by save_pretrained"
        ) from error
    check_complete(folder, model, report)
    return model.eval()


def in_one_line(error: Exception) -> str:
    """The beginning of what an error says, or else its name."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def check_complete(folder: Path, model: Any, report: dict[str, Any]) -> None:
    """Refuses a network that lacks tensors in its folder, which transformers would begin anew."""
    lacking = sorted(str(name) for name in report["missing_keys"])
    if lacking:
        raise ValueError(
            f"the files in {folder} lack {len(lacking)} tensors of {type(model).__name__}, such as {lacking[0]}; write "
            "it again by save_pretrained"
        )


def example(model: Any, *, length: int) -> Tensor:
    """Random tokens (1, length) for a text model, or fewer if it reads fewer.

    Raises:
        ValueError: If the model is called with something else than tokens.
    """
    config = model.config
    if model.main_input_name != TOKENS or config.is_encoder_decoder:
        inputs = "the tokens of an encoder and a decoder" if config.is_encoder_decoder else model.main_input_name
        raise ValueError(
            f"{type(model).__name__} takes {inputs}, but only networks that are called with {TOKENS} alone can be "
            "measured or become ONNX here; export it in Python, with an example"
        )
    text = config.get_text_config()
    most = min(length, getattr(text, "max_position_embeddings", None) or length)
    return torch.randint(text.vocab_size, (1, most), generator=torch.Generator().manual_seed(0))


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """While this lasts, transformers says nothing but errors."""
    log = transformers.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()
