"""What is imported only where a user asks for it: packages of an extra, and functions of the user's own."""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


def extra(name: str, group: str) -> Any:
    """An optional package; a ValueError that says how to install it if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f'{name} cannot be imported ({error}); pip install "pacprune[{group}]"') from None


def function(spelled: str) -> Callable[..., Any]:
    """The function or class at package.module:name."""
    module, _, name = spelled.partition(":")
    return getattr(importlib.import_module(module), name)


def own_function(spelled: str, *, what: str) -> Callable[..., Any]:
    """A function of the user's own at package.module:function; the module may lie in the current folder."""
    with _current_folder():
        return _imported(spelled, f"the {what} {spelled!r} cannot be imported")


def call(spelled: str, offers: Mapping[str, Any], *, what: str) -> Any:
    """What a function of the user's own returns, which is spelled package.module:function.

    The module may lie in the current folder. A parameter of the function that is named like an offer gets it; every
    other one needs a default.

    Args:
        spelled: Where the function is.
        offers: What it can ask for, by name.
        what: What it makes, for the error.

    Returns:
        Its result.

    Raises:
        ValueError: If there is no such function, or it fails.
    """
    failed = f"the {what} {spelled!r} cannot be made"
    with _current_folder():
        maker = _imported(spelled, failed)
        try:
            signature = inspect.signature(maker)
            arguments = {name: offers[name] for name in signature.parameters if name in offers}
            signature.bind(**arguments)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{failed} ({type(error).__name__}: {error}); give package.module:function, whose parameters are among "
                f"{', '.join(map(repr, offers))} or have defaults"
            ) from error
        try:
            return maker(**arguments)
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            raise ValueError(f"{failed} ({type(error).__name__}: {error}); {spelled} itself raised that") from error


@contextmanager
def _current_folder() -> Iterator[None]:
    """While this lasts, modules of the current folder can be imported."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")


def _imported(spelled: str, failed: str) -> Callable[..., Any]:
    """`function`, with an error that says what is wrong: a name, or the module itself."""
    module, _, name = spelled.partition(":")
    try:
        return function(spelled)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        unknown = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        if not module or unknown:
            remedy = "give package.module:function, of a module that is installed or lies in the current folder"
        elif module in sys.modules and not hasattr(sys.modules[module], name):
            remedy = "give package.module:function"
        else:
            remedy = f"the import of {module} raised that"
        raise ValueError(f"{failed} ({type(error).__name__}: {error}); {remedy}") from error
