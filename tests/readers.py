"""Who reads a field of a contract class: reads of `.field` whose receiver is known to be of that class.

A receiver's class is known, in this order, from
1. the enclosing function's variables: annotated parameters, assignments, loop and comprehension targets;
2. an attribute that some class of the tree declares with that type (annotation, property, `self.x = annotated name`),
   its elements (`card.components[name]`, `.values()`, `.items()`, `.get()`), or a call of an annotated function;
3. a name that is the class's own in snake case (`step`, `result`), where 1 and 2 know nothing.
`getattr(receiver, name)` counts for the constants `name` runs over in its function. Not counted: the class's own body,
and functions that only serialise (`SERIALISERS`), since they copy every field whether or not anything depends on it.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

SERIALISERS = {"record", "to_json", "from_json", "_content", "dumps", "loads"}
_ELEMENTS = {"values", "get", "pop"}
_SAME = {"reversed", "sorted", "list", "tuple", "dict", "iter", "set", "replace"}

Known = tuple[str, ...]  # a type: ("Card",), or with what it holds: ("*", "Component")


@dataclass
class Tree:
    """Sources, parsed, with the types that attributes and functions declare."""

    modules: dict[str, ast.Module]
    classes: set[str]
    attributes: dict[str, Known] = field(default_factory=dict)
    returns: dict[str, Known] = field(default_factory=dict)


def readers(sources: dict[str, str], classes: Iterable[str]) -> dict[tuple[str, str], list[str]]:
    """(class, field) -> "module:line" of each read. `sources`: module name -> text."""
    tree = Tree({name: ast.parse(text) for name, text in sources.items()}, set(classes))
    _declarations(tree)
    found: dict[tuple[str, str], list[str]] = {}
    for name, module in tree.modules.items():
        for cls, attribute, line in _Reads(tree).of(module):
            found.setdefault((cls, attribute), []).append(f"{name}:{line}")
    return found


def sources_of(package: Path) -> dict[str, str]:
    """Every module of a package."""
    return {str(p.relative_to(package)): p.read_text(encoding="utf-8") for p in sorted(package.rglob("*.py"))}


def _type(annotation: ast.expr | None, classes: set[str]) -> Known:
    """The contract class an annotation names; for a container the class of its last argument, as elements."""
    if annotation is None:
        return ()
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return _type(ast.parse(annotation.value, mode="eval").body, classes)
    if isinstance(annotation, ast.Name):
        return (annotation.id,) if annotation.id in classes else ()
    if isinstance(annotation, ast.BinOp):
        return _type(annotation.left, classes) or _type(annotation.right, classes)
    if isinstance(annotation, ast.Subscript):
        inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        for item in reversed(inner):
            if found := _type(item, classes):
                return ("*", *found)
    return ()


def _declarations(tree: Tree) -> None:
    for module in tree.modules.values():
        for node in ast.walk(module):
            if isinstance(node, ast.AnnAssign) and (kind := _type(node.annotation, tree.classes)):
                name = node.target.attr if isinstance(node.target, ast.Attribute) else getattr(node.target, "id", "")
                tree.attributes.setdefault(name, kind)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (kind := _type(node.returns, tree.classes)):
                is_property = any(getattr(d, "id", "") == "property" for d in node.decorator_list)
                (tree.attributes if is_property else tree.returns).setdefault(node.name, kind)
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                _own_attributes(tree, node)


def _own_attributes(tree: Tree, init: ast.FunctionDef) -> None:
    known = {a.arg: _type(a.annotation, tree.classes) for a in (*init.args.args, *init.args.kwonlyargs)}
    for target, value in _assignments(init):
        if isinstance(target, ast.Attribute) and isinstance(value, ast.Name) and known.get(value.id):
            tree.attributes.setdefault(target.attr, known[value.id])


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    for part in ast.walk(node):
        if isinstance(part, ast.Assign):
            for target in part.targets:
                if isinstance(target, ast.Tuple) and isinstance(part.value, ast.Tuple):
                    yield from zip(target.elts, part.value.elts, strict=False)
                else:
                    yield target, part.value
        elif isinstance(part, ast.NamedExpr):
            yield part.target, part.value


class _Reads:
    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    def of(self, module: ast.Module) -> Iterator[tuple[str, str, int]]:
        yield from self._scope(module, {}, {}, "")

    def _scope(self, node: ast.AST, names: dict[str, Known], words: dict[str, list[str]], own: str):
        """Reads below `node`; functions and classes are scopes of their own."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            if getattr(node, "name", "") in SERIALISERS:
                return
            names, words = dict(names), dict(words)
            for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                names.pop(argument.arg, None)
                if kind := _type(argument.annotation, self.tree.classes):
                    names[argument.arg] = kind
            for _ in range(3):  # a variable may depend on a later one
                self._bind(node, names, words)
        if isinstance(node, ast.ClassDef):
            own = node.name
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            cls = self._class(node.value, names)
            if cls and cls != own:
                yield cls, node.attr, node.lineno
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            cls = self._class(node.args[0], names)
            for word in self._words(node.args[1], words) if cls and cls != own else ():
                yield cls, word, node.lineno
        for child in ast.iter_child_nodes(node):
            yield from self._scope(child, names, words, own)

    def _bind(self, function: ast.AST, names: dict[str, Known], words: dict[str, list[str]]) -> None:
        for target, value in _assignments(function):
            if isinstance(target, ast.Name) and (kind := self._known(value, names)):
                names.setdefault(target.id, kind)
        for node in ast.walk(function):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names[node.target.id] = _type(node.annotation, self.tree.classes)
            if isinstance(node, ast.For | ast.comprehension):
                self._target(node.target, node.iter, names, words)

    def _target(self, target: ast.expr, over: ast.expr, names: dict[str, Known], words: dict[str, list[str]]) -> None:
        kind = self._known(over, names)
        last = target.elts[-1] if isinstance(target, ast.Tuple) else target
        if kind[:1] == ("*",) and isinstance(last, ast.Name):
            names.setdefault(last.id, kind[1:])
        if isinstance(target, ast.Name) and isinstance(over, ast.Tuple | ast.List):
            words[target.id] = [e.value for e in over.elts if isinstance(e, ast.Constant) and isinstance(e.value, str)]

    def _words(self, name: ast.expr, words: dict[str, list[str]]) -> list[str]:
        if isinstance(name, ast.Constant):
            return [str(name.value)]
        return words.get(name.id, []) if isinstance(name, ast.Name) else []

    def _class(self, receiver: ast.expr, names: dict[str, Known]) -> str:
        kind = self._known(receiver, names)
        if not kind and isinstance(receiver, ast.Name | ast.Attribute):
            word = receiver.id if isinstance(receiver, ast.Name) else receiver.attr
            snake = {re.sub(r"(?<!^)(?=[A-Z])", "_", cls).lower(): cls for cls in self.tree.classes}
            return snake.get(word.lstrip("_"), "")
        return kind[0] if kind and kind[0] != "*" else ""

    def _known(self, value: ast.expr, names: dict[str, Known]) -> Known:
        if isinstance(value, ast.Name):
            return names.get(value.id, ())
        if isinstance(value, ast.Attribute):
            return self.tree.attributes.get(value.attr, ())
        if isinstance(value, ast.Subscript):
            kind = self._known(value.value, names)
            return kind if isinstance(value.slice, ast.Slice) else kind[1:] if kind[:1] == ("*",) else ()
        if isinstance(value, ast.IfExp):
            return self._known(value.body, names) or self._known(value.orelse, names)
        if isinstance(value, ast.BoolOp):
            return next((k for k in (self._known(v, names) for v in value.values) if k), ())
        if isinstance(value, ast.Tuple | ast.List):
            return next(
                (k for e in value.elts if isinstance(e, ast.Starred) and (k := self._known(e.value, names))), ()
            )
        if isinstance(value, ast.Await):
            return self._known(value.value, names)
        if isinstance(value, ast.Call):
            return self._called(value, names)
        return ()

    def _called(self, call: ast.Call, names: dict[str, Known]) -> Known:
        if isinstance(call.func, ast.Attribute):
            kind = self._known(call.func.value, names)
            if kind[:1] == ("*",):
                if call.func.attr == "items":
                    return kind
                return kind if call.func.attr == "values" else kind[1:] if call.func.attr in _ELEMENTS else ()
            return self.tree.returns.get(call.func.attr, ())
        if isinstance(call.func, ast.Name):
            if call.func.id in self.tree.classes:
                return (call.func.id,)
            if call.func.id in _SAME and call.args:
                return self._known(call.args[0], names)
            if call.func.id in ("next", "enumerate") and call.args:
                kind = self._known(call.args[0], names)
                return kind[1:] if call.func.id == "next" and kind[:1] == ("*",) else kind
            return self.tree.returns.get(call.func.id, ())
        return ()
