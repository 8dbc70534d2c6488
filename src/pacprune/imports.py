"""What is imported only where a user asks for it: packages of an extra, and functions of the user's own."""

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
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
    sys.path.insert(0, "")
    try:
        return function(spelled)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise ValueError(
            f"the {what} {spelled!r} cannot be imported ({type(error).__name__}: {error}); give package.module:function"
        ) from error
    finally:
        sys.path.remove("")


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
    sys.path.insert(0, "")
    try:
        maker = function(spelled)
        return maker(**{name: offers[name] for name in inspect.signature(maker).parameters if name in offers})
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise ValueError(
            f"the {what} {spelled!r} cannot be made ({type(error).__name__}: {error}); give package.module:function, "
            f"whose parameters are among {', '.join(map(repr, offers))} or have defaults"
        ) from error
    finally:
        sys.path.remove("")
