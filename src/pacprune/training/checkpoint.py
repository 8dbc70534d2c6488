"""Atomic checkpoints: a training run killed at any moment goes on from its last one and ends the same, bit for bit."""

import hashlib
import io
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pacprune.data import trace
from pacprune.data.batches import example_hashes, generators, label_hashes
from pacprune.data.trace import Trace
from pacprune.distributed import is_sharded, local, ranks
from pacprune.files import digest, write_atomically
from pacprune.masking import attachment, weights
from pacprune.masking.sampler import keep_prob_of
from pacprune.training.config import Config
from pacprune.training.step import Stage
from pacprune.types import Data

# --- Files.


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


def save_shards(path: Path, **content: Any) -> None:
    """`save` of every rank's part in a file of its own: the last one stays until all ranks have written the next."""
    current = _rank_file(path)
    following = _next_file(current)
    save(following, **content)
    ranks.barrier()
    following.replace(current)


def load_shards(path: Path, identity: str) -> dict[str, Any] | None:
    """This rank's part of the last checkpoint that all ranks have written: not always the last that it has itself."""
    current = _rank_file(path)
    strangers = _files_of_other_worlds(path)
    parts = [] if strangers else [load(file, identity) for file in (current, _next_file(current))]
    by_place = {(part["epoch"], part["batch"]): part for part in parts if part is not None}
    of_ranks = ranks.gathered((strangers, sorted(by_place)))
    if any(names for names, _ in of_ranks):
        name = next(names[0] for names, _ in of_ranks if names)
        raise ValueError(
            f"the checkpoint {name} was written by another number of ranks, and {ranks.world()} are running; "
            "start as many as then, or delete it"
        )
    common = set.intersection(*(set(places) for _, places in of_ranks))
    if not common and any(places for _, places in of_ranks):
        lacking = next(rank for rank, (_, places) in enumerate(of_ranks) if not places)
        raise ValueError(
            f"rank {lacking} has no part of the checkpoint {path}, though others have theirs; bring it back, or delete "
            "theirs to start this stage again"
        )
    return by_place[max(common)] if common else None


def _files_of_other_worlds(path: Path) -> list[str]:
    """Parts of this checkpoint that another number of ranks has written."""
    names = sorted(file.name for file in path.parent.iterdir()) if path.parent.exists() else []
    matches = ((name, re.fullmatch(rf"{re.escape(path.name)}\.\d+-of-(\d+)(\.next)?", name)) for name in names)
    return [name for name, match in matches if match and int(match[1]) != ranks.world()]


def _rank_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.{ranks.rank()}-of-{ranks.world()}")


def _next_file(file: Path) -> Path:
    return file.with_name(f"{file.name}.next")


def stored_scores(
    folder: str | Path,
    request: dict[str, Any],
    model: nn.Module,
    data: Data,
    make: Callable[[], dict[str, Tensor]],
) -> dict[str, Tensor]:
    """make(), or what it returned to an interrupted run: sums on a GPU are not repeated to the last bit.

    It must follow from the request, which JSON can hold, the model and the data.
    """
    if ranks.world() > 1:
        return make()
    request_text = json.dumps(request, sort_keys=True)
    examples = {f"examples of {request_text}": example_hashes(data), f"labels of {request_text}": label_hashes(data)}
    identity = digest({**examples, **state(model)}, rows=local)
    path = Path(folder) / f"{identity[:12]}.scores"
    content = load(path, identity)
    if content is None:
        scores = make()
        made = {name: t.cpu() for name, t in scores.items()}
        traces = {"seen": weights.seen(model), "origin": trace.noted(scores.values())}
        save(path, identity=identity, made=made, **{key: [t.examples, t.labelled] for key, t in traces.items()})
        return scores
    weights.mark_seen(model, Trace(*content["seen"]))
    device = next(model.parameters()).device
    scores = {name: t.to(device) for name, t in content["made"].items()}
    trace.note(scores, Trace(*content["origin"]))
    return scores


# --- Which run it is.


def identity(model: nn.Module, configs: Sequence[Config], stage: Stage, seeds: Sequence[int]) -> str:
    """A hash of all that the outcome of a stage follows from; refuses when the ranks do not hold the same."""
    ranks.barrier()
    content = {
        "stage": stage.name,
        # Without the means of execution: a run may go on on another device.
        "config": [config.identity() for config in configs],
        "seed": list(seeds),
        "model": _hash_of_ranks(state(model)),
        "trainable": [n for n, p in model.named_parameters() if p.requires_grad],
        "masks": [_hash_of_ranks(mask) for _, mask in weights.noted_masks(model)]
        + [_hash_of_ranks({n: p.detach() for n, p in weights.learned(model).items()})],
        "samplers": [
            [*s.settings, s.seed.tolist(), s.step.tolist()] for s in (site.sampler for site in attachment.sites(model))
        ],
        **stage.identity,
    }
    topics = {
        "data": (("seen", "labels"), "give every rank all of the data: each takes its part of every batch"),
        "masks": (("masks", "samplers"), "make them from the same scores and seed on every rank"),
        "weights": (("model",), "start every rank from the same weights"),
        "prior": (("prior",), "give every rank the same prior"),
    }
    named = {key for keys, _ in topics.values() for key in keys}
    topics["settings"] = (tuple(content.keys() - named), "call it with the same arguments on every rank")
    ranks.require_equal({topic: (_hash(content, keys), remedy) for topic, (keys, remedy) in topics.items()})
    return _hash(content, list(content))


def _hash_of_ranks(tensors: dict[str, Tensor]) -> str:
    """A hash of tensors; where each rank has its rows, of all of them."""
    if any(map(is_sharded, tensors.values())):
        return " ".join(ranks.gathered(digest(tensors, rows=local)))
    return digest(tensors)


def _hash(content: dict[str, Any], keys: Sequence[str]) -> str:
    selected = {key: content[key] for key in keys if key in content}
    return hashlib.sha256(json.dumps(selected, sort_keys=True).encode()).hexdigest()


# --- What training changes.


def state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict, detached, without what is only the present draw of a sharded model."""
    draws = {id(p) for p in attachment.sample_parameters(model)}
    return {n: t.detach() for n, t in model.state_dict(keep_vars=True).items() if id(t) not in draws}


def model_state(model: nn.Module) -> dict[str, Any]:
    """Everything of the model that training changes, with the noted masks."""
    return {
        "state": {n: local(t).clone() for n, t in state(model).items()},
        "mappings": {site.name: site.sampler.settings[:3] for site in attachment.sites(model)},
        "masks": [local(keep).clone() for _, keep in weights.masked(model)],
        "learned": [local(p.detach()).clone() for p in weights.learned(model).values()],
    }


def keep_probs(content: dict[str, Any]) -> dict[str, Tensor]:
    """keep_prob of every weight by its plain name, from what `model_state` returned; empty for a plain model."""
    probabilities = {}
    for name, settings in content.get("mappings", {}).items():  # older checkpoints have none, or no estimator
        owner, _, attribute = name.rpartition(".")
        prefix = f"{owner}.parametrizations.{attribute}" if owner else f"parametrizations.{attribute}"
        mean, gate, shift, sharpness = (
            content["state"][f"{prefix}.{part}"] for part in ("original0", "original1", "0.shift", "0.sharpness")
        )
        law = dict(zip(("mapping", "coupling", "estimator"), settings, strict=False))
        probabilities[name] = keep_prob_of(mean, gate, shift, sharpness, **law)
    return probabilities


def load_model_state(model: nn.Module, content: dict[str, Any]) -> None:
    """Puts `model_state` back, in place."""
    tensors = state(model)
    if any(map(is_sharded, tensors.values())):
        for name, tensor in tensors.items():
            local(tensor).copy_(content["state"][name])
    else:
        model.load_state_dict(content["state"])
    for (_, keep), saved in zip(weights.masked(model), content["masks"], strict=True):
        local(keep).copy_(saved)
    # A checkpoint has none of it once the masks are fixed.
    for p, saved in zip(weights.learned(model).values(), content["learned"], strict=False):
        local(p.detach()).copy_(saved)


def random_state(device: torch.device, data: Data) -> dict[str, Any]:
    """torch's global random state on the CPU and on the device, for dropout, and that of a DataLoader's generators."""
    states: dict[str, Any] = {"cpu": torch.get_rng_state(), "data": [g.get_state() for g in generators(data)]}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_state(states: dict[str, Any], device: torch.device, data: Data) -> None:
    """Puts `random_state` back."""
    torch.set_rng_state(states["cpu"])
    for generator, saved in zip(generators(data), states["data"], strict=True):
        generator.set_state(saved)
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
