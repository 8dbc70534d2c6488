"""Atomic checkpoints: a training run killed at any moment goes on from its last one and ends the same, bit for bit."""

import hashlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pacprune.data.batches import example_hashes, generators
from pacprune.distributed import is_sharded, local, ranks
from pacprune.files import digest, write_atomically
from pacprune.masking import attachment, weights
from pacprune.types import Data


def save(path: Path, **content: Any) -> None:
    """Stores tensors, numbers and strings (what `torch.load(weights_only=True)` accepts) atomically, SHA-256 first."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_atomically(path, hashlib.sha256(buffer.getvalue()).digest() + buffer.getvalue())


def load(path: Path, identity: str) -> dict[str, Any] | None:
    """The checkpoint at `path`, None when there is none, a ValueError when it belongs to another run or is damaged."""
    if not path.exists():
        return None
    stored = path.read_bytes()
    if hashlib.sha256(stored[32:]).digest() != stored[:32]:  # torch.load would take most flipped bits as weights
        raise ValueError(
            f"the checkpoint {path} is damaged: its {len(stored)} bytes do not have the hash that they begin with; "
            "delete it to start this stage again"
        )
    content = torch.load(io.BytesIO(stored[32:]), weights_only=True, map_location="cpu")
    if content["identity"] != identity:
        raise ValueError(
            f"the checkpoint {path} belongs to another run "
            f"(it has {content['identity'][:12]}, this run is {identity[:12]}): "
            "other settings, data or starting weights; choose another folder or delete it"
        )
    return content


def kept(
    folder: str | Path | None, name: str, model: nn.Module, data: Data, make: Callable[[], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """make(), or what it returned to a run that was broken off: sums on a GPU are not repeated to the last bit.

    It must follow from the `name`, the model and the data.
    """
    if folder is None or ranks.world() > 1:
        return make()
    identity = digest({name: example_hashes(data), **state(model)}, rows=local)
    path = Path(folder) / f"{identity[:12]}.scores"
    content = load(path, identity)
    if content is None:
        made = make()
        save(path, identity=identity, made={name: t.cpu() for name, t in made.items()}, seen=weights.seen(model))
        return made
    weights.mark_seen(model, content["seen"])
    device = next(model.parameters()).device
    return {name: t.to(device) for name, t in content["made"].items()}


def save_shards(path: Path, **content: Any) -> None:
    """`save` of every rank's part in a file of its own: the last one stays until all ranks have written the next."""
    own = _own(path)
    following = own.with_name(f"{own.name}.next")
    save(following, **content)
    ranks.barrier()
    following.replace(own)


def load_shards(path: Path, identity: str) -> dict[str, Any] | None:
    """This rank's part of the last checkpoint that all ranks have written: not always the last that it has itself."""
    own = _own(path)
    names = sorted(p.name for p in path.parent.iterdir()) if path.parent.exists() else []
    parts_of = ((name, re.fullmatch(rf"{re.escape(path.name)}\.\d+-of-(\d+)(\.next)?", name)) for name in names)
    others = [name for name, part in parts_of if part and int(part[1]) != ranks.world()]
    parts = [load(p, identity) for p in (own, own.with_name(f"{own.name}.next"))] if not others else []
    found = {(part["epoch"], part["batch"]): part for part in parts if part is not None}
    everyone = ranks.gathered((others, sorted(found)))
    if any(strangers for strangers, _ in everyone):
        name = next(strangers[0] for strangers, _ in everyone if strangers)
        raise ValueError(
            f"the checkpoint {name} was written by another number of ranks, and {ranks.world()} are running; "
            "start as many as then, or delete it"
        )
    common = set.intersection(*(set(moments) for _, moments in everyone))
    if not common and any(moments for _, moments in everyone):
        lacking = next(rank for rank, (_, moments) in enumerate(everyone) if not moments)
        raise ValueError(
            f"rank {lacking} has no part of the checkpoint {path}, though others have theirs; bring it back, or delete "
            "theirs to start this stage again"
        )
    return found[max(common)] if common else None


def _own(path: Path) -> Path:
    return path.with_name(f"{path.name}.{ranks.rank()}-of-{ranks.world()}")


def state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict, detached, without what is only the present draw of a sharded model."""
    draws = {id(p) for p in attachment.sample_parameters(model)}
    return {n: t.detach() for n, t in model.state_dict(keep_vars=True).items() if id(t) not in draws}


def model_state(model: nn.Module) -> dict[str, Any]:
    """Everything of the model that training changes, with the draw counters of its samplers and the noted masks."""
    return {
        "state": {n: local(t).clone() for n, t in state(model).items()},
        "steps": [site.sampler.step.clone() for site in attachment.sites(model)],
        "masks": [local(keep).clone() for _, keep in weights.masked(model)],
    }


def load_model_state(model: nn.Module, content: dict[str, Any]) -> None:
    """Puts `model_state` back, in place."""
    own = state(model)
    if any(map(is_sharded, own.values())):
        for name, tensor in own.items():
            local(tensor).copy_(content["state"][name])
    else:
        model.load_state_dict(content["state"])
    for site, step in zip(attachment.sites(model), content["steps"], strict=True):
        site.sampler.step.copy_(step)
    for (_, keep), saved in zip(weights.masked(model), content["masks"], strict=True):
        local(keep).copy_(saved)


def random_state(device: torch.device, data: Data) -> dict[str, Any]:
    """torch's global random state on the CPU and on the device, for dropout, and that of a DataLoader's generators."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state(), "data": [g.get_state() for g in generators(data)]}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device, data: Data) -> None:
    """Puts `random_state` back."""
    torch.set_rng_state(state["cpu"])
    for generator, own in zip(generators(data), state["data"], strict=True):
        generator.set_state(own)
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
