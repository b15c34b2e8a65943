"""The shape of the package: data flow is import order, private torch stays in one file, nothing grows a tail.

Each rule is a function from a file's syntax tree to what breaks it; the tests at the end run them on the
package, and on lines that must be caught.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import shardkit

# A file imports from lines above its own, or from names before it on its line. SIBLINGS come last and do not
# import one another, though a package its own files. A new file is added here, at its place in the flow.
DATA_FLOW = """
    errors _torch containers shard_random
    placement boxes precision schedule mesh
    packing plan
    layout join buffer
    streams collectives agreement
    specs exchange ragged_ops ragged_reduce ragged_views ragged
    extension params sharding sharded_param
    gather extension_gather grad_rows grads bucket reduction assemble
    unit checks interop
    hooks watch module api
"""
SIBLINGS = ("clip", "report", "wrap", "quantized", "init", "optim", "checkpoint", "tools")
ROOT = "shardkit"  # the package's __init__: imports from all, imported by none

PLACE = {name: place for place, name in enumerate([*DATA_FLOW.split(), *SIBLINGS, ROOT])}

# What torch's surface dictates is as large as torch's surface.
WIDE_CLASSES = re.compile(r"FSDPModule|RaggedTensor|RaggedShard")
OPTIMIZER = re.compile(r"Optimizer$")
# Private by name, public by use: what DTensor subclasses, optimizers and named tuples are written with.
OPEN_PRIVATE = re.compile(r"_local_tensor|_spec|_version|_(foreach|fused)_\w+|_replace|_asdict|_fields|_make")
# Tokens that make no code line.
SILENT = {getattr(tokenize, name) for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")}

SOURCE_FOLDER = Path(shardkit.__file__).parent
FILES = sorted(SOURCE_FOLDER.rglob("*.py"))
Rule = Callable[[str, ast.Module], Iterator[str]]


def stage(path: Path) -> str:
    """The name of a file, or of the sub-package it is in, in the data flow."""
    first = path.relative_to(SOURCE_FOLDER).parts[0].removesuffix(".py")
    return ROOT if first == "__init__" else first


def imported_modules(node: ast.AST) -> list[str]:
    """The full dotted names that an import statement brings in, imported names included."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
    return []


def imports_from_above(name: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        for dotted in imported_modules(node):
            package, _, rest = dotted.partition(".")
            if not package:
                yield f"relative import {dotted}: write it from shardkit"
            elif package == ROOT:
                target = rest.split(".")[0]
                target = target if target in PLACE else ROOT
                siblings = name in SIBLINGS and target in SIBLINGS
                if target != name and (siblings or PLACE[target] > PLACE[name]):
                    yield f"imports {dotted}, which does not come before it in DATA_FLOW"


def private_names(name: str, tree: ast.Module) -> Iterator[str]:
    """Names with an underscore that belong to torch or to another file."""
    if name == "_torch":
        return
    own = own_private_names(tree)
    for node in ast.walk(tree):
        for dotted in imported_modules(node):
            parts = dotted.removeprefix(f"{ROOT}._torch").split(".")
            if any(re.match("_[^_]", part) for part in parts):
                yield f"imports private {dotted}"
        attribute = private_attribute(node)
        if attribute and attribute not in own and not OPEN_PRIVATE.fullmatch(attribute):
            yield f"uses private {attribute} of another"


def private_attribute(node: ast.AST) -> str | None:
    """The `_name` of `x._name` or `getattr(x, "_name")`, unless x is the object itself."""
    if isinstance(node, ast.Attribute):
        owner, name = node.value, node.attr
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
        if node.func.id not in ("getattr", "setattr", "hasattr", "delattr"):
            return None
        owner, argument = node.args[:2]
        name = str(argument.value) if isinstance(argument, ast.Constant) else ""
    else:
        return None
    itself = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
    parent = isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id == "super"
    return name if re.match("_[^_]", name) and not itself and not parent else None


def own_private_names(tree: ast.Module) -> set[str]:
    """What the file defines itself: its functions, fields, and attributes set on self."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            names.update({node.attr} if isinstance(node.ctx, ast.Store) else ())
    return names


def lazy_imports(name: str, tree: ast.Module) -> Iterator[str]:
    for function in functions(tree):
        for node in ast.walk(function):
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield f"line {node.lineno}: import inside {function.name}"


def long_functions(name: str, tree: ast.Module, source: str) -> Iterator[str]:
    lines = code_lines(source, tree)
    for function in functions(tree):
        length = sum(function.lineno <= line <= (function.end_lineno or 0) for line in lines)
        if length > 60:
            yield f"{function.name} has {length} code lines, over 60"


def wide_classes(name: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base) for base in node.bases]
            num_methods = sum(isinstance(item, ast.FunctionDef) for item in node.body)
            excepted = WIDE_CLASSES.fullmatch(node.name) or any(OPTIMIZER.search(base) for base in bases)
            if num_methods > 12 and not excepted:
                yield f"{node.name} has {num_methods} methods, over 12"


def undocumented(name: str, tree: ast.Module) -> Iterator[str]:
    """Public functions and classes of the file, and the file itself, without a docstring."""
    definitions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    definitions = [node for node in definitions if "overload" not in map(ast.unparse, node.decorator_list)]
    for node in (tree, *definitions):
        title = "the file" if isinstance(node, ast.Module) else node.name
        if not title.startswith("_") and ast.get_docstring(node) is None:
            yield f"{title} has no docstring"


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def code_lines(source: str, tree: ast.Module) -> set[int]:
    """The numbers of the lines with code on them: no blanks, comments or docstrings."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    spoken = [token for token in tokens if token.type not in SILENT]
    lines = {line for token in spoken for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return lines


RULES: list[Rule] = [imports_from_above, private_names, lazy_imports, wide_classes, undocumented]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE_FOLDER)))
def test_file_keeps_the_rules(path: Path) -> None:
    source = path.read_text()
    tree, name = ast.parse(source), stage(path)
    assert name in PLACE, f"{path.name} has no place in the data flow: add it to DATA_FLOW in {__file__}"
    broken = [fault for rule in RULES for fault in rule(name, tree)]
    broken += long_functions(name, tree, source)
    num_lines = source.count("\n")
    assert num_lines <= 500, f"{path.name} has {num_lines} lines, over 500: one file is one stage"
    assert not broken, "\n".join(f"{path.name}: {fault}" for fault in broken)


def test_exported_names_have_docstrings() -> None:
    exported = {name: value for name, value in vars(shardkit).items() if callable(value)}
    assert [name for name, value in exported.items() if not value.__doc__] == []


@pytest.mark.parametrize(
    ("rule", "name", "line", "fault"),
    [
        (imports_from_above, "plan", "from shardkit.bucket import Bucket", "shardkit.bucket.Bucket"),
        (imports_from_above, "packing", "import shardkit.plan", "shardkit.plan"),
        (imports_from_above, "plan", "from shardkit import fully_shard", "shardkit.fully_shard"),
        (imports_from_above, "plan", "from .params import ParamSpec", "relative"),
        (imports_from_above, "optim", "from shardkit.checkpoint.load import f", "shardkit.checkpoint.load"),
        (private_names, "plan", "from torch.nn.modules._functions import F", "_functions"),
        (private_names, "plan", "from shardkit.params import _names", "_names"),
        (private_names, "plan", "torch._dynamo.disable(f)", "_dynamo"),
        (private_names, "plan", "torch.ops._c10d_functional.wait_tensor(x)", "_c10d_functional"),
        (private_names, "plan", "module._parameters['w'] = p", "_parameters"),
        (private_names, "plan", "getattr(mesh, '_flatten')()", "_flatten"),
        (lazy_imports, "plan", "def f():\n    import torch", "inside f"),
        (wide_classes, "plan", "class C:\n" + "".join(f"    def m{i}(self): ...\n" for i in range(13)), "13"),
        (undocumented, "plan", "def f(): ...", "f has no docstring"),
    ],
)
def test_rule_catches(rule: Rule, name: str, line: str, fault: str) -> None:
    assert any(fault in found for found in rule(name, ast.parse(line)))


@pytest.mark.parametrize(
    ("rule", "name", "line"),
    [
        (imports_from_above, "plan", "from shardkit.packing import pack"),
        (imports_from_above, "optim", "from shardkit.optim.muon import Muon"),
        (imports_from_above, ROOT, "from shardkit.api import fully_shard"),
        (private_names, "plan", "from shardkit._torch import flatten_mesh"),
        (private_names, "plan", "torch._foreach_mul_(a._local_tensor, b._spec)"),
        (private_names, "plan", "self._x = other._x"),
        (private_names, "_torch", "from torch.utils._pytree import tree_map"),
        (wide_classes, "ragged", "class RaggedTensor:\n" + "    def m(self): ...\n" * 13),
    ],
)
def test_rule_allows(rule: Rule, name: str, line: str) -> None:
    assert list(rule(name, ast.parse(line))) == []


def test_code_lines_leave_out_blanks_comments_and_docstrings() -> None:
    source = '"""A.\n\nB."""\n\nx = """a\nb"""  # c\n# d\n\ndef f():\n    """Doc."""\n    return (\n    1)\n'
    assert code_lines(source, ast.parse(source)) == {5, 6, 9, 11, 12}
