"""pacprune: learn pruning masks, and prove how good the pruned network is.

    import pacprune as pp

The nouns are scores, masks, SpikeSlab, Split, Config and Certificate; the rest are verbs. See docs/ for a tutorial.
"""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pacprune._version import __version__ as __version__

if TYPE_CHECKING:
    from pacprune.public import *  # noqa: F403

ALIASES = {
    "export": "deploy.export",
    "linear": "theory.linear",
    "patterns": "masking.patterns",
    "ranks": "distributed.ranks",
    "scores": "masking.criteria",
    "slim": "deploy.slim",
    "wide": "theory.linearised",
}
"""`import pacprune.linear` and the like, whatever folder a public module lies in."""


class _Aliases(MetaPathFinder, Loader):
    """Finds the module behind an alias; a module has two names then, and exists once."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        return ModuleSpec(fullname, self) if package == __name__ and name in ALIASES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(f"{__name__}.{ALIASES[spec.name.rpartition('.')[2]]}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # It was executed under its first name, and importing it under the second has replaced its spec.
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


sys.meta_path.append(_Aliases())


def __getattr__(name: str) -> Any:
    """A module of the package, or a public name: torch comes with the first of those, not with `pacprune --help`."""
    if name != "__all__" and name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    public = import_module(f"{__name__}.public")
    if name not in ("__all__", *public.__all__):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, getattr(public, name))


def __dir__() -> list[str]:
    """The public names: what the folders hold beside them is private."""
    return sorted([*import_module(f"{__name__}.public").__all__, "__version__"])
