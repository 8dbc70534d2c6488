"""Atomic checkpoints: a training run killed at any moment goes on from its last one and ends the same, bit for bit."""

import hashlib
import io
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pacprune import layers


def write_atomically(path: Path, content: bytes) -> None:
    """Writes beside the target and renames: a reader sees the old file or the new one, never a half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def digest(tensors: dict[str, Tensor]) -> str:
    """SHA-256 over names and bytes."""
    found = hashlib.sha256()
    for name, tensor in tensors.items():
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def save(path: Path, **content: Any) -> None:
    """Stores tensors, numbers and strings (what `torch.load(weights_only=True)` accepts) atomically."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_atomically(path, buffer.getvalue())


def load(path: Path, identity: str) -> dict[str, Any] | None:
    """The checkpoint at `path`, None when there is none, a ValueError when it belongs to another run or is damaged."""
    if not path.exists():
        return None
    try:
        content = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        raise ValueError(
            f"the checkpoint {path} cannot be read ({error}); delete it to start this stage again"
        ) from error
    if content["identity"] != identity:
        raise ValueError(
            f"the checkpoint {path} belongs to another run "
            f"(it has {content['identity'][:12]}, this run is {identity[:12]}): "
            "other settings, data or starting weights; choose another folder or delete it"
        )
    return content


def model_state(model: nn.Module) -> dict[str, Any]:
    """Everything of the model that training changes, the draw counters of its samplers included."""
    return {
        "state": {n: t.detach().clone() for n, t in model.state_dict().items()},
        "steps": [int(site.sampler.step) for site in layers.sites(model)],
    }


def load_model_state(model: nn.Module, content: dict[str, Any]) -> None:
    """Puts `model_state` back, in place."""
    model.load_state_dict(content["state"])
    for site, step in zip(layers.sites(model), content["steps"], strict=True):
        site.sampler.step.fill_(step)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """torch's global random state on the CPU and on the device, for dropout and user samplers."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Puts `random_state` back."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
