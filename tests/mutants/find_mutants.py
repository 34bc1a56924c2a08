"""Small changes to a module's source: mutants, by cosmic-ray's operators and one more."""

from __future__ import annotations

import ast
import difflib
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.operators.provider import _OPERATORS
from parso.python.tree import Keyword

# Frozen and slotted classes behave as others do, so that no test can tell.
UNTOLD = {"frozen", "slots", "kw_only", "repr", "stacklevel", "exc_info", "name"}
# Their mutants are equal to others' (`VariableReplacer`), or are no Python here.
LEFT_OUT = {"VariableReplacer", "VariableInserter"}
Position = tuple[int, int]


class RemoveStatement(Operator):  # type: ignore[misc]
    """Replaces a call, or an assignment to an attribute or an item, by `pass`."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Position, Position]]:
        if node.type == "simple_stmt" and self._removable(node.children[0]):
            yield node.start_pos, node.end_pos

    def _removable(self, statement: Any) -> bool:
        if statement.type == "expr_stmt":
            target, sign = statement.children[0], statement.children[1]
            # Without the assignment to a local name, what follows fails anyway.
            return target.type == "atom_expr" and sign.type == "operator"
        return statement.type in ("atom_expr", "power", "await_expr", "del_stmt")

    def mutate(self, node: Any, index: int) -> Any:
        first = node.children[0]
        leaf = first.get_first_leaf()
        node.children[0] = Keyword("pass", first.start_pos, prefix=leaf.prefix)
        return node

    @classmethod
    def examples(cls) -> tuple[Any, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change. `before` and `after` are its lines, stripped."""

    line: int
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        return f"{self.line}: {self.before}  →  {self.after}"


@dataclass(frozen=True, slots=True)
class Place:
    """Something to change: an occurrence of an operator, as cosmic-ray counts them."""

    operator: type[Any]
    occurrence: int
    line: int


def places(source: str, seed: str) -> list[Place]:
    """Return what can be changed in random order: for each place, one of each kind of change.

    Annotations, docstrings, messages of errors and of logs, and `__all__` are left alone.
    """
    draw = random.Random(seed)
    operators = [kind for name, kind in _OPERATORS.items() if name not in LEFT_OUT]
    operators.append(RemoveStatement)
    skipped = list(_skipped(ast.parse(source)))
    nodes = list(ast_nodes(get_ast(source)))
    changes: dict[tuple[str, Position], list[Place]] = defaultdict(list)
    for kind in operators:
        find = kind().mutation_positions
        starts = (start for node in nodes for start, _ in find(node))
        for occurrence, start in enumerate(starts):
            if not any(first <= start < last for first, last in skipped):
                family = kind.__name__.split("_")[0]
                changes[family, start].append(Place(kind, occurrence, start[0]))
    found = [draw.choice(changes[key]) for key in sorted(changes)]
    draw.shuffle(found)
    return found


def mutant(source: str, place: Place) -> Mutant | None:
    """Return the mutant that a place gives; `None` if it is no Python."""
    try:
        mutated = mutate_code(source, place.operator(), place.occurrence)
    except AttributeError:  # cosmic-ray's operator for exceptions knows no dotted names
        return None
    if mutated is None or not _parses(mutated):
        return None
    before, after = _difference(source, mutated)
    if before.replace(" *,", " /,") == after:  # keywords are still accepted
        return None
    if before.endswith("@abstractmethod") and not after:
        return None
    return Mutant(place.line, before, after, mutated)


def _skipped(tree: ast.Module) -> Iterator[tuple[Position, Position]]:
    """Yield the spans of what no test should notice."""
    for node in ast.walk(tree):
        spans: list[ast.AST | None] = []
        match node:
            case ast.arg():
                spans = [node.annotation]
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                spans = [node.returns]
            case ast.AnnAssign():
                spans = [node.annotation]
            case ast.Assign(targets=[ast.Name(id=name)]) if name == "__all__" or _is_type(node):
                spans = [node]
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                spans = [node]
            case ast.ClassDef(bases=bases) if any(_name(base) == "Protocol" for base in bases):
                spans = [*node.decorator_list, node]
            case ast.Raise():
                spans = list(_messages(node.exc))
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="log")))):
                spans = [node]
            case ast.keyword(arg=str(name)) if name in UNTOLD:
                spans = [node.value]
            case ast.JoinedStr():
                spans = [node]
        for span in spans:
            if span is not None:
                yield _start(span), _end(span)


def _is_type(node: ast.Assign) -> bool:
    """Whether this names a type: `Headers = list[tuple[bytes, bytes]]`, or a type variable."""
    value = node.value
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr):
        return isinstance(value.left, ast.Subscript)
    if isinstance(value, ast.Subscript):
        return isinstance(value.value, ast.Name)
    return isinstance(value, ast.Call) and ast.unparse(value.func) in ("TypeVar", "ParamSpec")


def _name(base: ast.expr) -> str:
    """Return the name of a class, without its parameters."""
    inner = base.value if isinstance(base, ast.Subscript) else base
    return inner.id if isinstance(inner, ast.Name) else ""


def _messages(error: ast.expr | None) -> Iterator[ast.AST]:
    if isinstance(error, ast.Call):
        yield from (each for each in error.args if isinstance(each, (ast.JoinedStr, ast.BinOp)))


def _start(node: Any) -> Position:
    return node.lineno, node.col_offset


def _end(node: Any) -> Position:
    return node.end_lineno, node.end_col_offset


def _parses(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def _difference(before: str, after: str) -> tuple[str, str]:
    removed, added = [], []
    for line in difflib.ndiff(before.splitlines(), after.splitlines()):
        if line.startswith("- "):
            removed.append(line[2:].strip())
        elif line.startswith("+ "):
            added.append(line[2:].strip())
    return " ⏎ ".join(removed), " ⏎ ".join(added)
