"""The small faults that `tests.mutants` puts into functions, and what is left alone.

Left alone by rule: code outside of functions (types, tables, constants of limits and time-outs), annotations, defaults
of arguments, docstrings, `__repr__` and `__str__`, what is said in errors, logs and f-strings, arguments that are
time-outs, `strict` of zip, and what is asserted for mypy.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_COMPARE: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATE: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_SWAPPED: Final = {"min": "max", "max": "min", "any": "all", "all": "any", "popleft": "pop", "append": "appendleft"}
_ANY_ORDER: Final = {"min", "max", "suppress"}
"""Functions that do the same in whatever order their arguments are."""
_LOGS: Final = {"log", "logging", "warnings"}
_SILENT: Final = {"__repr__", "__str__", "describe"}
_TIMES: Final = ("timeout", "limit", "patience", "seconds", "pause", "interval")
Change = tuple[str, ast.AST]
"""What is done, and the node that takes the place of the one before."""


@dataclass(frozen=True)
class Mutant:
    """One change of one node of a function: the `index`-th of all changes that its module can have."""

    path: str
    function: str
    line: int
    index: int
    at: int
    what: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.at} {self.function}: {self.what}: {self.before}  =>  {self.after}"


def changes_of(node: ast.AST) -> Iterator[Change]:
    """The changes of one node, without those of the nodes in it."""
    yield from _changed_conditions(node)
    yield from _changed_values(node)
    yield from _changed_statements(node)
    if isinstance(node, ast.Call):
        yield from _changed_calls(node)


def _changed_conditions(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Compare(left, operators, others):
            for number, operator in enumerate(operators):
                changed = [*operators[:number], _COMPARE[type(operator)](), *operators[number + 1 :]]
                yield "comparison", ast.Compare(left, changed, others)
        case ast.BoolOp(operator, operands):
            yield "and/or", ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), operands)
            for number in range(len(operands)):
                others = operands[:number] + operands[number + 1 :]
                yield "left out", others[0] if len(others) == 1 else ast.BoolOp(operator, others)
        case ast.UnaryOp(ast.Not(), operand):
            yield "not", operand
        case ast.If(test, body, otherwise) if not isinstance(test, ast.Constant):
            yield "never", ast.If(ast.Constant(False), body, otherwise)
            yield "always", ast.If(ast.Constant(True), body, otherwise)
        case ast.IfExp(_, body, otherwise):
            yield "never", otherwise
            yield "always", body


def _changed_values(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.BinOp(left, operator, right) if type(operator) in _OPERATE and not _is_text(left, right):
            yield "arithmetic", ast.BinOp(left, _OPERATE[type(operator)](), right)
        case ast.AugAssign(target, operator, value) if type(operator) in _OPERATE:
            yield "arithmetic", ast.AugAssign(target, _OPERATE[type(operator)](), value)
        case ast.Constant(bool() as value):
            yield "constant", ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            yield "constant", ast.Constant(value + 1 if value + 1 != value else value / 2)


def _changed_statements(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Raise() | ast.AugAssign() | ast.Delete() | ast.Expr(ast.Call() | ast.Await()):
            yield "left out", ast.Pass()
        case ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield "left out", ast.Pass()
        case ast.Break():
            yield "break", ast.Continue()
        case ast.Continue():
            yield "continue", ast.Break()


def _changed_calls(call: ast.Call) -> Iterator[Change]:
    match call.func:
        case ast.Name(name) if name in _SWAPPED:
            yield "function", ast.Call(ast.Name(_SWAPPED[name], ast.Load()), call.args, call.keywords)
        case ast.Attribute(value, name) if name in _SWAPPED:
            yield "function", ast.Call(ast.Attribute(value, _SWAPPED[name], ast.Load()), call.args, call.keywords)
    if ast.unparse(call.func).rpartition(".")[2] in _ANY_ORDER:
        return
    for number, (one, other) in enumerate(zip(call.args, call.args[1:], strict=False)):
        if type(one) is not type(other) or ast.unparse(one) == ast.unparse(other):
            continue
        if isinstance(one, ast.Name | ast.Attribute) and not ast.unparse(one).isupper():
            swapped = [*call.args[:number], other, one, *call.args[number + 2 :]]
            yield "arguments swapped", ast.Call(call.func, swapped, call.keywords)


def _is_text(*nodes: ast.expr) -> bool:
    return any(
        isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))
        for node in nodes
    )


def _left_alone(parent: ast.AST, field: str, node: ast.AST) -> bool:
    if field in ("annotation", "returns", "decorator_list", "defaults", "kw_defaults", "type_params"):
        return True
    if isinstance(parent, ast.Raise) or isinstance(node, ast.JoinedStr | ast.Assert | ast.ClassDef):
        return True
    if isinstance(node, ast.keyword):
        return (node.arg or "").endswith((*_TIMES, "strict"))
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        names = [found.id for found in ast.walk(node.value.func) if isinstance(found, ast.Name)]
        return bool(_LOGS & set(names))
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


Place = tuple[ast.AST, str, int | None, ast.AST, str, int, int]


def _places(parent: ast.AST, function: str, first_line: int, at: int) -> Iterator[Place]:
    """Every node inside of a function that may be changed, with where it hangs, and the function's name and line."""
    for field, value in ast.iter_fields(parent):
        for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(node, ast.AST) or _left_alone(parent, field, node):
                continue
            line = getattr(node, "lineno", at)
            yield parent, field, index, node, function, first_line, line
            yield from _places(node, function, first_line, line)


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[Place]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name not in _SILENT:
            first_line = min([node.lineno, *(found.lineno for found in node.decorator_list)])
            for statement in range(len(node.body)):
                # The body alone: neither arguments nor decorators.
                if not _left_alone(node, "body", node.body[statement]):
                    place = node.body[statement]
                    yield node, "body", statement, place, prefix + node.name, first_line, place.lineno
                    yield from _places(place, prefix + node.name, first_line, place.lineno)


def _changes(tree: ast.Module) -> Iterator[tuple[Place, Change]]:
    for place in _functions(tree):
        for change in changes_of(place[3]):
            yield place, change


def mutants_of(path: str, source: str) -> list[Mutant]:
    mutants = []
    for index, (place, (what, new)) in enumerate(_changes(ast.parse(source))):
        _, _, _, node, function, first_line, line = place
        before, after = (_short(found) for found in (node, new))
        mutants.append(Mutant(path, function, first_line, index, line, what, before, after))
    return mutants


def mutated(source: str, index: int) -> ast.Module:
    """The module with the change of this number."""
    tree = ast.parse(source)
    (parent, field, number, node, *_), (_, new) = next(
        found for count, found in enumerate(_changes(tree)) if count == index
    )
    ast.copy_location(new, node)
    if number is None:
        setattr(parent, field, new)
    else:
        getattr(parent, field)[number] = new
    return ast.fix_missing_locations(tree)


def _short(node: ast.AST) -> str:
    if isinstance(node, ast.If):
        return f"if {ast.unparse(node.test)}"
    return " ".join(ast.unparse(node).split())
