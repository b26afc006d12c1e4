"""A plugin and one version of its host, as a program whose names can be looked up."""

from __future__ import annotations

import ast
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from packaging.version import InvalidVersion, Version

from interposer_tools._seams.call_text import calls_in
from interposer_tools._seams.module_scope import (
    Binding,
    ClassMembers,
    ModuleScope,
    exports,
)
from interposer_tools._seams.signature import CallShape, Parameter, ParameterKind, Signature
from interposer_tools._seams.source_tree import SourceTree
from interposer_tools._seams.values import (
    UNKNOWN,
    Class,
    Function,
    Instance,
    Items,
    Missing,
    Module,
    SuperOf,
    Unknown,
    Value,
)

__all__ = ["Program"]

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Environment = Mapping[str, Value]
"""Values of local names."""

_MAX_DEPTH = 40
# Bases that add no attributes by which a lookup could differ between versions of a host.
_EMPTY_BASES = frozenset({"object", "ABC", "Generic", "Protocol"})
_OPTIONAL = frozenset({"Optional", "Annotated", "Final", "ClassVar", "Required", "NotRequired"})
_SEQUENCES = frozenset(
    [
        "list",
        "List",
        "Sequence",
        "Iterable",
        "Iterator",
        "Collection",
        "set",
        "Set",
        "frozenset",
        "deque",
        "Generator",
    ]
)
_MAPPINGS = frozenset(
    ["dict", "Dict", "Mapping", "MutableMapping", "OrderedDict", "defaultdict", "DefaultDict"]
)
_EQUAL = re.compile(r"version_?(is|eq|equals?)$")
_AT_LEAST = re.compile(r"version_?(is_)?(ge|gte|at_least|since)$")
_BELOW = re.compile(r"version_?(is_)?(lt|below|before)$")


class Program:
    """The modules of a plugin and of one version of its host.

    Args:
        plugin: source of the plugin.
        host: source of the host.
        packages: top-level packages of the host that count as the host.
        parsed: syntax trees of the plugin's modules, shared between programs.
    """

    def __init__(
        self,
        plugin: SourceTree,
        host: SourceTree,
        packages: frozenset[str],
        parsed: dict[str, ast.Module],
    ) -> None:
        self.plugin, self.host, self.packages = plugin, host, packages
        self._parsed = parsed
        self._scopes: dict[str, ModuleScope | None] = {}
        self._members: dict[Class, ClassMembers] = {}
        self._orders: dict[Class, tuple[list[Class], bool]] = {}
        self._classes: dict[ast.ClassDef, Class] = {}
        self._values: dict[tuple[object, ...], Value] = {}
        self._pending: set[tuple[object, ...]] = set()
        self._num_cuts = 0
        self._calls: dict[str, list[tuple[CallShape, str]]] = {}
        self._plugin_calls: dict[str, list[CallShape]] = {}
        self._plugin_classes: list[Class] = []
        self._modules_by_call: dict[str, list[str]] = defaultdict(list)

    # Modules

    def scope(self, name: str) -> ModuleScope | None:
        """Return a module of the plugin or the host, or None if there is no source for it."""
        if name not in self._scopes:
            self._scopes[name] = None  # while the module is built, and if its source has an error
            self._scopes[name] = self._build(name)
        return self._scopes[name]

    def _build(self, name: str) -> ModuleScope | None:
        for tree, is_host in ((self.plugin, False), (self.host, True)):
            text = tree.sources.get(name)
            if text is None or (is_host and name.partition(".")[0] not in self.packages):
                continue
            parsed = self._parsed.get(name) if not is_host else None
            if parsed is None:
                parsed = _parse(text)
                if parsed is None:
                    return None
                if not is_host:
                    self._parsed[name] = parsed
            file = tree.files[name]
            is_package = file.endswith("__init__.py")
            return ModuleScope(name, text, parsed, is_package, is_host, file, self.truth)
        return None

    def is_host(self, name: str) -> bool:
        """Return whether a dotted name lies in a package of the host."""
        return name.partition(".")[0] in self.packages

    def module(self, name: str) -> Value:
        """Return the module ``name``; unknown outside of plugin and host."""
        top = name.partition(".")[0]
        if top in self.plugin.packages:
            return Module(name) if self.plugin.has_package(name) else UNKNOWN
        if top not in self.packages:
            return UNKNOWN
        if self.host.has_package(name):
            return Module(name)
        parts = name.split(".")
        # A compiled module may have submodules, and an sdist has no compiled modules at all.
        is_compiled = any(part.startswith("_") for part in parts[1:])
        return Missing(f"there is no module {name}", not is_compiled)

    # Names

    def name_in(self, module: str, name: str) -> Value:
        """Return the attribute ``name`` of a module at run time."""
        return self._once(("name", module, name), lambda: self._name_in(module, name))

    def _name_in(self, module: str, name: str) -> Value:
        scope = self.scope(module)
        if scope is None:
            sub = self.module(f"{module}.{name}")
            if isinstance(sub, Module):
                return sub
            tree = self.host if self.is_host(module) else self.plugin
            is_folder = tree.has_package(module) and module not in tree.sources
            if is_folder and module not in tree.compiled:
                return Missing(f"there is no module {module}.{name}")
            return UNKNOWN
        bindings = scope.bindings.get(name, [])
        usable = [b for b in bindings if scope.is_dynamic or not b.is_typing_only]
        if usable:
            return self._best(scope, usable)
        is_open = False
        for star in scope.stars:
            source = self._imported_module(scope, star)
            value = self._through_star(source, name)
            if value is None:
                is_open = True
            elif not isinstance(value, Missing):
                return value
        if isinstance(sub := self.module(f"{module}.{name}"), Module):
            return sub
        if scope.is_replaced:
            for binding in scope.bindings.get("*", ()):
                if isinstance(binding.statement, ast.ImportFrom):
                    source = self._imported_module(scope, binding.statement)
                    value = self._through_star(source, name)
                    if value is not None and not isinstance(value, Missing):
                        return value
        if name.startswith("__"):
            return UNKNOWN
        if scope.is_dynamic and re.search(rf"\b{re.escape(name)}\b", scope.text):
            return UNKNOWN
        return Missing(f"{module} has no {name!r}", not (is_open or scope.is_dynamic))

    def _through_star(self, source: str, name: str) -> Value | None:
        """Return ``name`` of a module that is imported with ``*``; None if that is unknown."""
        inner = self.scope(source)
        if inner is None:
            return None
        exported = exports(inner)
        if exported is not None and name not in exported:
            return Missing("not exported")
        if exported is None and name.startswith("_"):
            return Missing("private")
        return self.name_in(source, name)

    def _best(self, scope: ModuleScope, bindings: Sequence[Binding]) -> Value:
        """Return the value of the first binding that can be read."""
        values = []
        for binding in bindings:
            if isinstance(binding.node, FunctionNode) and _is_overload(binding.node):
                continue
            values.append(self.value_of(scope, binding))
        readable = [v for v in values if not isinstance(v, Unknown | Missing)]
        functions = [v for v in readable if isinstance(v, Function)]
        if len(functions) > 1 and len({str(self.signature(f)) for f in functions}) > 1:
            return UNKNOWN
        if readable:
            return readable[0]
        # In a host, an unreadable import is no proof of absence.
        missing = [v for v in values if isinstance(v, Missing)]
        return (
            missing[0] if missing and len(missing) == len(values) and not scope.is_host else UNKNOWN
        )

    def value_of(self, scope: ModuleScope, binding: Binding) -> Value:
        """Return the value of a top-level binding."""
        node = binding.node
        match node:
            case ast.alias():
                return self.imported(scope, binding.statement, node)
            case ast.ClassDef():
                return self.class_of(scope, node, node.name)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                return Function(scope, node, node.name)
        if binding.annotation is not None:
            value = self.annotated(scope, binding.annotation)
            if not isinstance(value, Unknown):
                return value
        if isinstance(node, ast.expr):
            return self._once(("value", node), lambda: self.evaluate(scope, node, {}))
        return UNKNOWN

    def imported(self, scope: ModuleScope, statement: ast.stmt, alias: ast.alias) -> Value:
        """Return the value that one name of an import statement binds."""
        if isinstance(statement, ast.Import):
            full = self.module(alias.name)
            if isinstance(full, Missing):
                return full
            return full if alias.asname else self.module(alias.name.partition(".")[0])
        assert isinstance(statement, ast.ImportFrom)
        module = self._imported_module(scope, statement)
        source = self.module(module)
        if not isinstance(source, Module):
            return source
        return self.name_in(module, alias.name)

    @staticmethod
    def _imported_module(scope: ModuleScope, statement: ast.ImportFrom) -> str:
        if not statement.level:
            return statement.module or ""
        parent = scope.parent(statement.level)
        return f"{parent}.{statement.module}" if statement.module else parent

    def _once(self, key: tuple[object, ...], compute: Callable[[], Value]) -> Value:
        """Return the stored value for ``key``, computed on the first call; unknown in a cycle."""
        if key in self._values:
            return self._values[key]
        if key in self._pending or len(self._pending) > _MAX_DEPTH:
            self._num_cuts += 1
            return UNKNOWN
        self._pending.add(key)
        num_cuts = self._num_cuts
        try:
            value = compute()
        finally:
            self._pending.discard(key)
        # A value that was computed inside a cycle is incomplete, except for the outermost one.
        if num_cuts == self._num_cuts or not self._pending:
            self._values[key] = value
        return value

    # Classes

    def class_of(self, scope: ModuleScope, node: ast.ClassDef, name: str) -> Class:
        """Return the one value of a class definition."""
        if node not in self._classes:
            self._classes[node] = Class(scope, node, name)
        return self._classes[node]

    def members(self, cls: Class) -> ClassMembers:
        """Return what the body and the methods of a class define, without base classes."""
        if cls not in self._members:
            self._members[cls] = ClassMembers.of(cls.node, self.truth)
        return self._members[cls]

    def order(self, cls: Class) -> tuple[list[Class], bool]:
        """Return the class and its base classes in the order of lookups.

        Returns: the classes that can be read, and whether there are others.
        """
        if cls not in self._orders:
            self._orders[cls] = ([cls], True)  # for a class that inherits from itself
            lists, is_open = [], bool(cls.node.keywords)
            for base in cls.node.bases:
                value = self.evaluate(cls.scope, base, {})
                if isinstance(value, Class):
                    inner, inner_open = self.order(value)
                    lists.append(inner)
                    is_open = is_open or inner_open
                else:
                    expression = base.value if isinstance(base, ast.Subscript) else base
                    is_open = is_open or _last_name(expression) not in _EMPTY_BASES
            classes = [cls, *(c for inner in lists for c in inner)]
            # A base that several bases share comes after all of them.
            last_positions = {c: number for number, c in enumerate(classes)}
            self._orders[cls] = (
                [c for n, c in enumerate(classes) if last_positions[c] == n],
                is_open,
            )
        return self._orders[cls]

    def owner(self, cls: Class, name: str, after: Class | None = None) -> Class | None:
        """Return the first class that defines ``name``, only among those after ``after``."""
        classes = self.order(cls)[0]
        if after is not None:
            classes = classes[classes.index(after) + 1 :]
        for candidate in classes:
            members = self.members(candidate)
            if name in members.bindings or name in members.attributes:
                return candidate
        return None

    def member(self, cls: Class, name: str, *, bound: bool, after: Class | None = None) -> Value:
        """Return an attribute of a class, or of its instances if ``bound``."""
        classes, is_open = self.order(cls)
        owner = self.owner(cls, name, after)
        if owner is not None:
            return self._once(
                ("member", owner, cls, name, bound),
                lambda: self._member_of(owner, cls, name, bound),
            )
        if name.startswith("__") or any(_is_dynamic(self.members(c)) for c in classes):
            return UNKNOWN
        return Missing(f"{cls.target} has no {name!r}", not is_open)

    def _member_of(self, owner: Class, cls: Class, name: str, bound: bool) -> Value:
        members = self.members(owner)
        bindings = [
            b
            for b in members.bindings.get(name, ())
            if not (isinstance(b.node, FunctionNode) and _is_overload(b.node))
        ]
        if bindings:
            binding = bindings[-1]
            node = binding.node
            if isinstance(node, FunctionNode):
                return self._method(owner, cls, node, bindings, bound)
            if isinstance(node, ast.ClassDef):
                return self.class_of(owner.scope, node, f"{owner.name}.{name}")
            if binding.annotation is not None:
                value = self.annotated(owner.scope, binding.annotation, owner)
                if not isinstance(value, Unknown):
                    return value
            if self.is_enum(owner) and binding.annotation is None:
                return Instance(owner)
            if isinstance(node, ast.expr) and binding.annotation is None:
                value = self.evaluate(owner.scope, node, {})
                # A class as default is mostly replaced; a method by another name is not.
                return value if isinstance(value, Instance | Class) else UNKNOWN
        for binding, method in members.attributes.get(name, ()):
            if binding.annotation is not None:
                value = self.annotated(owner.scope, binding.annotation, owner)
            elif isinstance(binding.node, ast.expr):
                value = self.evaluate(
                    owner.scope, binding.node, self.parameters(owner.scope, owner, method)
                )
            else:
                continue
            if not isinstance(value, Unknown | Missing):
                return value
        return UNKNOWN

    def _method(
        self,
        owner: Class,
        cls: Class,
        node: FunctionNode,
        bindings: Sequence[Binding],
        bound: bool,
    ) -> Value:
        decorators = {_last_name(decorator) for decorator in node.decorator_list}
        name = f"{owner.name}.{node.name}"
        if decorators & {"property", "cached_property", "setter", "getter"}:
            if not bound:
                return UNKNOWN
            getter = bindings[0].node
            assert isinstance(getter, FunctionNode)
            return self.annotated(owner.scope, getter.returns, cls) if getter.returns else UNKNOWN
        if "staticmethod" in decorators:
            return Function(owner.scope, node, name, owner, is_bound=False)
        is_bound = bound or "classmethod" in decorators
        if any("property" in decorator.lower() for decorator in decorators):
            return UNKNOWN
        return Function(owner.scope, node, name, owner, is_bound=is_bound)

    def is_enum(self, cls: Class) -> bool:
        """Return whether a class derives from an enumeration of the standard library."""
        return any(
            "Enum" in _last_name(base) or _last_name(base) in ("IntFlag", "Flag")
            for c in self.order(cls)[0]
            for base in c.node.bases
        )

    def parameters(
        self, scope: ModuleScope, owner: Class | None, function: FunctionNode
    ) -> dict[str, Value]:
        """Return the values of a function's parameters, by their annotations."""
        values: dict[str, Value] = {}
        arguments = function.args
        positional = [*arguments.posonlyargs, *arguments.args]
        for argument in [*positional, *arguments.kwonlyargs]:
            values[argument.arg] = (
                self.annotated(scope, argument.annotation, owner)
                if argument.annotation is not None
                else UNKNOWN
            )
        decorators = {_last_name(decorator) for decorator in function.decorator_list}
        if owner is not None and positional and "staticmethod" not in decorators:
            first = positional[0].arg
            values[first] = owner if "classmethod" in decorators else Instance(owner)
        for extra in (arguments.vararg, arguments.kwarg):
            if extra is not None:
                values[extra.arg] = UNKNOWN
        return values

    def abstract_methods(self, cls: Class) -> dict[str, Class]:
        """Return the abstract methods that neither the class nor a base implements, by name."""
        classes = self.order(cls)[0]
        methods: dict[str, Class] = {}
        for candidate in reversed(classes):
            for name, bindings in self.members(candidate).bindings.items():
                node = bindings[-1].node
                is_abstract = isinstance(node, FunctionNode) and any(
                    _last_name(d).startswith("abstract") for d in node.decorator_list
                )
                if is_abstract:
                    methods[name] = candidate
                else:
                    methods.pop(name, None)
        return methods

    # Signatures

    def signature(self, value: Value) -> Signature | None:
        """Return the signature of a call of ``value``, or None if it cannot be read."""
        if isinstance(value, Function):
            signature = Signature.of(value.node.args)
            return signature.bound() if value.is_bound else signature
        if isinstance(value, Class):
            return self._constructor(value)
        return None

    def _constructor(self, cls: Class) -> Signature | None:
        classes, is_open = self.order(cls)
        if self.is_enum(cls):
            return None
        for candidate in classes:
            bindings = self.members(candidate).bindings
            if "__init__" in bindings:
                node = bindings["__init__"][-1].node
                return Signature.of(node.args).bound() if isinstance(node, FunctionNode) else None
            if "__new__" in bindings:
                return None
            if self._is_dataclass(candidate):
                return self._fields(cls)
        return None if is_open else Signature(())

    def _is_dataclass(self, cls: Class) -> bool:
        if any(_last_name(base) in ("NamedTuple", "Struct") for base in cls.node.bases):
            return True
        for decorator in cls.node.decorator_list:
            call = decorator.func if isinstance(decorator, ast.Call) else decorator
            if _last_name(call).endswith("dataclass"):
                return True
            value = self.evaluate(cls.scope, call, {})
            if isinstance(value, Function) and any(
                _last_name(d) == "dataclass_transform" for d in value.node.decorator_list
            ):
                return True
        return False

    def _fields(self, cls: Class) -> Signature | None:
        """Return the parameters of a dataclass, named tuple or struct."""
        parameters: dict[str, Parameter] = {}
        for candidate in reversed(self.order(cls)[0]):
            kind = ParameterKind.POSITIONAL
            if "kw_only=True" in "".join(map(ast.unparse, candidate.node.decorator_list)):
                kind = ParameterKind.KEYWORD_ONLY
            if any(k.arg == "kw_only" for k in candidate.node.keywords):
                kind = ParameterKind.KEYWORD_ONLY
            for statement in candidate.node.body:
                if not isinstance(statement, ast.AnnAssign):
                    continue
                annotation = ast.unparse(statement.annotation)
                if "KW_ONLY" in annotation:
                    kind = ParameterKind.KEYWORD_ONLY
                if not isinstance(statement.target, ast.Name) or "KW_ONLY" in annotation:
                    continue
                default = None if statement.value is None else ast.unparse(statement.value)
                if default and re.search(r"\b[fF]ield\(", default):
                    if re.search(r"\binit\s*=\s*False", default):
                        continue
                    if not re.search(
                        r"\bdefault(_factory)?\s*=|[fF]ield\(\s*[^\s)=]+[,)]", default
                    ):
                        default = None
                if "ClassVar" not in annotation:
                    name = statement.target.id
                    parameters[name] = Parameter(name, kind, default)
        ordered = sorted(parameters.values(), key=lambda parameter: parameter.kind)
        return Signature(tuple(ordered))

    # Expressions

    def attribute(self, value: Value, name: str) -> Value:
        """Return the attribute ``name`` of a value."""
        match value:
            case Module():
                return self.name_in(value.name, name)
            case Class():
                return self.member(value, name, bound=False)
            case Instance():
                return self.member(value.cls, name, bound=True)
            case SuperOf():
                return self.member(value.cls, name, bound=True, after=value.cls)
        return UNKNOWN

    def call(self, value: Value) -> Value:
        """Return the result of calling a value."""
        match value:
            case Class():
                return Instance(value)
            case Function(node=ast.FunctionDef(returns=ast.expr() as returns)):
                decorators = {_last_name(d) for d in value.node.decorator_list}
                if decorators & {"contextmanager", "asynccontextmanager"}:
                    return UNKNOWN
                return self.annotated(value.scope, returns, value.owner)
        return UNKNOWN

    def evaluate(self, scope: ModuleScope, node: ast.expr, local: Environment) -> Value:
        """Return the value of an expression; no finding is reported."""
        match node:
            case ast.Name():
                if node.id in local:
                    return local[node.id]
                is_bound = node.id in scope.bindings or bool(scope.stars)
                return _present(self.name_in(scope.name, node.id)) if is_bound else UNKNOWN
            case ast.Attribute():
                return _present(self.attribute(self.evaluate(scope, node.value, local), node.attr))
            case ast.Call(func=ast.Name(id="super"), args=[]):
                instance = next(iter(local.values()), UNKNOWN)
                cls = instance.cls if isinstance(instance, Instance) else instance
                return SuperOf(cls) if isinstance(cls, Class) else UNKNOWN
            case ast.Call(func=ast.Name(id="cast"), args=[annotation, _]):
                return self.annotated(scope, annotation)
            case ast.Call():
                return self.call(self.evaluate(scope, node.func, local))
            case ast.Subscript():
                inner = self.evaluate(scope, node.value, local)
                if isinstance(inner, Items):
                    return UNKNOWN if isinstance(node.slice, ast.Slice) else inner.item
                return inner if isinstance(inner, Class) else UNKNOWN
            case ast.Await():
                return UNKNOWN
            case ast.NamedExpr():
                return self.evaluate(scope, node.value, local)
            case ast.IfExp():
                first = self.evaluate(scope, node.body, local)
                return first if first == self.evaluate(scope, node.orelse, local) else UNKNOWN
            case ast.List(elts=[element, *_]) | ast.Tuple(elts=[element, *_]):
                return (
                    Items(self.evaluate(scope, element, local)) if len(node.elts) == 1 else UNKNOWN
                )
        return UNKNOWN

    def annotated(
        self, scope: ModuleScope, annotation: ast.expr, owner: Class | None = None
    ) -> Value:
        """Return the value that an annotation describes."""
        key = ("annotation", annotation, owner)
        return self._once(key, lambda: self._annotated(scope, annotation, owner))

    def _annotated(self, scope: ModuleScope, node: ast.expr, owner: Class | None) -> Value:
        match node:
            case ast.Constant(value=str(text)):
                try:
                    return self._annotated(scope, ast.parse(text, mode="eval").body, owner)
                except SyntaxError:
                    return UNKNOWN
            case ast.Name(id="Self") if owner is not None:
                return Instance(owner)
            case ast.Name() | ast.Attribute():
                value = self._typing_value(scope, node)
                return Instance(value) if isinstance(value, Class) else UNKNOWN
            case ast.BinOp(op=ast.BitOr()):
                return self._union(scope, [node.left, node.right], owner)
            case ast.Subscript():
                return self._subscripted(scope, node, owner)
        return UNKNOWN

    def _subscripted(self, scope: ModuleScope, node: ast.Subscript, owner: Class | None) -> Value:
        name = _last_name(node.value)
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if name in _OPTIONAL:
            return self.annotated(scope, parts[0], owner)
        if name == "Union":
            return self._union(scope, parts, owner)
        if name in ("type", "Type"):
            value = self.annotated(scope, parts[0], owner)
            return value.cls if isinstance(value, Instance) else UNKNOWN
        if name in _SEQUENCES:
            return Items(self.annotated(scope, parts[0], owner))
        if name in ("tuple", "Tuple") and len(parts) == 2 and ast.unparse(parts[1]) == "...":
            return Items(self.annotated(scope, parts[0], owner))
        if name in _MAPPINGS and len(parts) == 2:
            key, item = (self.annotated(scope, part, owner) for part in parts)
            return Items(item, key, is_mapping=True)
        value = self._typing_value(scope, node.value)
        return Instance(value) if isinstance(value, Class) else UNKNOWN

    def _union(self, scope: ModuleScope, parts: Sequence[ast.expr], owner: Class | None) -> Value:
        real = [p for p in parts if not (isinstance(p, ast.Constant) and p.value is None)]
        return self.annotated(scope, real[0], owner) if len(real) == 1 else UNKNOWN

    def _typing_value(self, scope: ModuleScope, node: ast.expr) -> Value:
        """Evaluate a name of an annotation, which may be imported for type checkers only."""
        if isinstance(node, ast.Name) and (bindings := scope.bindings.get(node.id)):
            return self._best(scope, bindings)
        return self.evaluate(scope, node, {})

    # Conditions

    def truth(self, test: ast.expr) -> bool | None:
        """Decide a condition on the version of the host; None if it depends on something else."""
        match test:
            case ast.Constant():
                return bool(test.value)
            case ast.UnaryOp(op=ast.Not()):
                inner = self.truth(test.operand)
                return None if inner is None else not inner
            case ast.BoolOp():
                values = [self.truth(value) for value in test.values]
                deciding = isinstance(test.op, ast.Or)
                if deciding in values:
                    return deciding
                return None if None in values else not deciding
            case ast.Call(args=[ast.Constant(value=str(text)), *_]):
                return self._version_call(_last_name(test.func), text)
            case ast.Compare(ops=[operator], comparators=[right]):
                return self._version_comparison(test.left, operator, right)
        return None

    def _version_call(self, name: str, text: str) -> bool | None:
        name = name.lower()
        if _EQUAL.search(name):
            return self._compares(text, lambda mine, other: mine == other)
        if _AT_LEAST.search(name):
            return self._compares(text, lambda mine, other: mine >= other)
        if _BELOW.search(name):
            return self._compares(text, lambda mine, other: mine < other)
        return None

    def _version_comparison(
        self, left: ast.expr, operator: ast.cmpop, right: ast.expr
    ) -> bool | None:
        compare = _OPERATORS.get(type(operator))
        text = _version_text(right)
        if compare is None or text is None:
            return None
        source = ast.unparse(left)
        is_version = any(f"{p}.__version__" in source for p in self.packages) or any(
            f"version('{p}')" in source or f"{p}_version" in source.lower() for p in self.packages
        )
        return self._compares(text, compare) if is_version else None

    def _compares(self, text: str, compare: Callable[[Version, Version], bool]) -> bool | None:
        try:
            mine, other = Version(self.host.version), Version(text)
        except InvalidVersion:
            return None
        # Local parts such as `+cpu` name a build, not a version.
        return compare(Version(mine.public), other)

    # The texts of plugin and host

    def plugin_calls(self, name: str) -> list[CallShape]:
        """Return the calls of methods called ``name`` in the plugin."""
        if name not in self._plugin_calls:
            self._plugin_calls[name] = [
                shape
                for text in self.plugin.sources.values()
                if f".{name}(" in text
                for shape, _ in calls_in(text, name)
            ]
        return self._plugin_calls[name]

    def plugin_defines(self, cls: Class, name: str) -> bool:
        """Return whether a class of the plugin that derives from ``cls`` defines ``name``."""
        if not self._plugin_classes:
            for module in self.plugin.sources:
                scope = self.scope(module)
                for node in scope.tree.body if scope is not None else ():
                    if isinstance(node, ast.ClassDef):
                        assert scope is not None
                        self._plugin_classes.append(self.class_of(scope, node, node.name))
        return any(
            cls in self.order(candidate)[0]
            and (
                name in self.members(candidate).bindings
                or name in self.members(candidate).attributes
            )
            for candidate in self._plugin_classes
        )

    def definitions(self, name: str) -> list[str]:
        """Return the modules of the host that define a function, class or constant ``name``."""
        pattern = re.compile(
            rf"^(?:class |def |async def ){re.escape(name)}\b|^{re.escape(name)}\s*[:=]",
            re.MULTILINE,
        )
        return [
            module
            for module, text in self.host.sources.items()
            if self.is_host(module) and name in text and pattern.search(text)
        ]

    def host_calls(self, name: str) -> list[tuple[CallShape, str]]:
        """Return the calls of functions and methods called ``name`` in the host, with positions."""
        if name not in self._calls:
            self._calls[name] = [
                (shape, f"{self.host.files[module]}:{line}")
                for module in self._calling_modules().get(name, ())
                for shape, line in calls_in(self.host.sources[module], name)
            ]
        return self._calls[name]

    def _calling_modules(self) -> Mapping[str, list[str]]:
        """Return the modules of the host that call a function, by the name of the function."""
        if not self._modules_by_call:
            for module, text in self.host.sources.items():
                if self.is_host(module):
                    for name in set(re.findall(r"\w+(?=\()", text)):
                        self._modules_by_call[name].append(module)
        return self._modules_by_call


_OPERATORS: Mapping[type[ast.cmpop], Callable[[Version, Version], bool]] = {
    ast.Eq: lambda mine, other: mine == other,
    ast.NotEq: lambda mine, other: mine != other,
    ast.Lt: lambda mine, other: mine < other,
    ast.LtE: lambda mine, other: mine <= other,
    ast.Gt: lambda mine, other: mine > other,
    ast.GtE: lambda mine, other: mine >= other,
}


def _parse(text: str) -> ast.Module | None:
    with warnings.catch_warnings():
        # Invalid escapes in the source of others are no news to the user.
        warnings.simplefilter("ignore")
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError):
            return None


def _present(value: Value) -> Value:
    return UNKNOWN if isinstance(value, Missing) else value


def _last_name(node: ast.expr) -> str:
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            return node.attr
        case ast.Call():
            return _last_name(node.func)
        case ast.Subscript():
            return _last_name(node.value)
    return ""


def _is_overload(node: FunctionNode) -> bool:
    return any(_last_name(decorator) == "overload" for decorator in node.decorator_list)


def _is_dynamic(members: ClassMembers) -> bool:
    return "__getattr__" in members.bindings or "__getattribute__" in members.bindings


def _version_text(node: ast.expr) -> str | None:
    """Return the text of ``"1.2"``, ``Version("1.2")`` or ``parse("1.2")``."""
    if isinstance(node, ast.Call) and _last_name(node.func) in ("Version", "parse") and node.args:
        node = node.args[0]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return None
