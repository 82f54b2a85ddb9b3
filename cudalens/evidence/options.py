"""Command-line options in the program's syntax: ``add_argument`` and the like."""

from __future__ import annotations

import ast


def is_option(node: ast.AST, name: str, default: int) -> bool:
    """Return whether a node declares a command-line option with this default.

    Args:
        node: any node of the program.
        name: the attribute with the option's value: ``nspk`` for ``--nspk``.
    """
    match node:
        case ast.Call(ast.Attribute(attr="add_argument"), flags, keywords):
            given = {it.arg: it.value for it in keywords}
            texts = [it.value for it in (given.get("dest"), *flags) if isinstance(it, ast.Constant)]
            names = [str(it).lstrip("-").replace("-", "_") for it in texts]
            is_same = ast.dump(given.get("default", node)) == ast.dump(ast.Constant(default))
            return is_same and name in (names[:1] if "dest" in given else names)
    return False
