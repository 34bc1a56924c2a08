"""Puts a mutant into modules that are imported already, so that no child imports them anew."""

from __future__ import annotations

import gc
import types
from collections import defaultdict

Codes = dict[str, list[types.CodeType]]  # by qualified name, in the order of the source


def fits(source: str) -> bool:
    """Whether functions of this source run as they are: none are compiled to machine code."""
    return "jit" not in source


def replace(path: str, source: str) -> bool:
    """Give each function of the module at `path` its code in `source`.

    Returns whether each could take it: one that uses other variables of its surroundings cannot.
    """
    new = _codes(compile(source, path, "exec"))
    old: dict[str, list[types.FunctionType]] = defaultdict(list)
    for function in gc.get_objects():
        if isinstance(function, types.FunctionType) and function.__code__.co_filename == path:
            old[function.__code__.co_qualname].append(function)
    taken = True
    for name, functions in old.items():
        lines = sorted({function.__code__.co_firstlineno for function in functions})
        for function in functions:
            place = lines.index(function.__code__.co_firstlineno)
            if place < len(new.get(name, ())):
                code = new[name][place]
                if code.co_freevars == function.__code__.co_freevars:
                    function.__code__ = code
                else:
                    taken = False
    return taken


def _codes(module: types.CodeType) -> Codes:
    found: Codes = defaultdict(list)
    waiting = [module]
    while waiting:
        code = waiting.pop(0)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                found[constant.co_qualname].append(constant)
                waiting.append(constant)
    for codes in found.values():
        codes.sort(key=lambda code: code.co_firstlineno)
    return found
