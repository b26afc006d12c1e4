"""Reads the source of a plugin, and compares each use of the host's names with the host."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from interposer_tools._seams.findings import Finding, Reading, Use, UseKind
from interposer_tools._seams.module_scope import ModuleScope, bound_names, is_type_checking
from interposer_tools._seams.program import Program
from interposer_tools._seams.signature import CallShape, Signature
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

__all__ = ["read_plugin"]

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
# The findings that an exception handler expects, by the name of the exception.
_EXPECTED: dict[str, frozenset[UseKind]] = {
    "ImportError": frozenset({UseKind.IMPORT}),
    "ModuleNotFoundError": frozenset({UseKind.IMPORT}),
    "AttributeError": frozenset({UseKind.ATTRIBUTE}),
    "TypeError": frozenset({UseKind.CALL}),
    "Exception": frozenset(UseKind),
    "BaseException": frozenset(UseKind),
}


def read_plugin(program: Program) -> Reading:
    """Return the uses of the host's names in all modules of the plugin, and their faults."""
    reading = Reading()
    for module in sorted(program.plugin.sources):
        scope = program.scope(module)
        if scope is not None and not scope.is_host:
            _Walker(program, scope, reading).walk(scope.tree.body)
    return reading


class _Walker:
    """Walks the statements of one module, function or class body.

    Args:
        local: values of local names; None at the top level of a module.
        owner: the class around a method or in whose body the walk is.
    """

    def __init__(
        self,
        program: Program,
        scope: ModuleScope,
        reading: Reading,
        local: dict[str, Value] | None = None,
        owner: Class | None = None,
        checked: frozenset[str] = frozenset(),
    ) -> None:
        self.program, self.scope, self.reading = program, scope, reading
        self.local: dict[str, Value] = local if local is not None else {}
        self.is_local = local is not None
        self.owner = owner
        self.checked = checked
        self._assigned: set[str] = set()
        self._depth = 0

    # Statements

    def walk(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    def _block(self, body: Sequence[ast.stmt]) -> None:
        self._depth += 1
        self.walk(body)
        self._depth -= 1

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Import() | ast.ImportFrom():
                self._import(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._function(node)
            case ast.ClassDef():
                self._class(node)
            case ast.If():
                self._if(node)
            case ast.Try() | ast.TryStar():
                self._try(node)
            case ast.Assign():
                value = self.visit(node.value)
                for target in node.targets:
                    self._store(target, value, node.value)
            case ast.AnnAssign():
                self.visit(node.annotation)
                value = self.visit(node.value) if node.value is not None else UNKNOWN
                declared = self.program.annotated(self.scope, node.annotation, self.owner)
                known = declared if not isinstance(declared, Unknown) else value
                self._store(node.target, known, node.value)
            case ast.AugAssign():
                self.visit(node.value)
                self._store(node.target, UNKNOWN, None)
            case ast.For() | ast.AsyncFor():
                self._bind(node.target, _item(self.visit(node.iter)))
                self._block(node.body)
                self._block(node.orelse)
            case ast.With() | ast.AsyncWith():
                self._with(node)
            case ast.While():
                self.visit(node.test)
                self._block(node.body)
                self._block(node.orelse)
            case ast.Assert():
                self.visit(node.test)
                for name, value in self._narrowed(node.test):
                    self.local[name] = value
            case ast.Expr(value=ast.Constant()):
                pass  # a docstring
            case ast.Match():
                self.visit(node.subject)
                for case in node.cases:
                    self._block(case.body)
            case _:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        self.visit(child)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if alias.name == "*":
                continue
            value = self.program.imported(self.scope, node, alias)
            if isinstance(node, ast.Import):
                name, target = alias.name, alias.name
            else:
                name = alias.name
                target = f"{node.module}:{alias.name}" if not node.level else ""
            if target and self.program.is_host(target.partition(":")[0]):
                self._use(node, UseKind.IMPORT, target)
                if isinstance(value, Missing):
                    self._report(node, UseKind.IMPORT, name, value.text, value.is_definite)
            if self.is_local:
                bound = alias.asname or alias.name.partition(".")[0]
                self.local[bound] = UNKNOWN if isinstance(value, Missing) else value

    def _function(self, node: FunctionNode) -> None:
        for expression in (
            *node.decorator_list,
            *node.args.defaults,
            *(value for value in node.args.kw_defaults if value is not None),
        ):
            self.visit(expression)
        method_of = self.owner if not self.is_local or self.owner is not None else None
        local = dict.fromkeys(bound_names(node), UNKNOWN)
        parameters = self.program.parameters(
            self.scope, method_of if self._is_class_body else None, node
        )
        inherited = {} if self._is_class_body else self.local
        walker = _Walker(
            self.program,
            self.scope,
            self.reading,
            # Parameters first: ``super()`` reads the first local name.
            {**parameters, **{k: v for k, v in inherited.items() if k not in parameters}}
            | {k: v for k, v in local.items() if k not in parameters},
            self.owner,
            self.checked | _checked_names(node),
        )
        walker._assigned = set(parameters)
        walker.walk(node.body)
        if self.is_local and not self._is_class_body:
            self.local[node.name] = Function(self.scope, node, node.name)

    @property
    def _is_class_body(self) -> bool:
        return self.owner is not None and not self.is_local

    def _class(self, node: ast.ClassDef) -> None:
        for expression in (*node.decorator_list, *node.bases):
            self.visit(expression)
        for keyword in node.keywords:
            self.visit(keyword.value)
        prefix = f"{self.owner.name}." if self._is_class_body and self.owner is not None else ""
        cls = self.program.class_of(self.scope, node, f"{prefix}{node.name}")
        _Walker(self.program, self.scope, self.reading, None, cls, self.checked).walk(node.body)
        self._check_overrides(cls)
        if self.is_local:
            self.local[node.name] = cls

    def _if(self, node: ast.If) -> None:
        if is_type_checking(node.test):
            with_findings = len(self.reading.findings)
            self._block(node.body)
            del self.reading.findings[with_findings:]
            self._block(node.orelse)
            return
        self.visit(node.test)
        decided = self._truth(node.test)
        if decided is not False:
            before = dict(self.local)
            narrowed = self._narrowed(node.test)
            for name, value in narrowed:
                self.local[name] = value
            self._block(node.body)
            for name, _ in narrowed:
                if name in before:
                    self.local[name] = before[name]
        if decided is not True:
            self._block(node.orelse)

    def _try(self, node: ast.Try | ast.TryStar) -> None:
        start = len(self.reading.findings)
        self._block(node.body)
        body_findings = self.reading.findings[start:]
        for handler in node.handlers:
            expected = _expected_kinds(handler)
            caught = [f for f in body_findings if f.kind in expected]
            start_of_handler = len(self.reading.findings)
            self._block(handler.body)
            if caught:
                for finding in caught:
                    self.reading.findings.remove(finding)
                body_findings = [f for f in body_findings if f not in caught]
            elif expected:
                # The handler runs only in versions where the body fails.
                del self.reading.findings[start_of_handler:]
        self._block(node.orelse)
        self._block(node.finalbody)

    def _with(self, node: ast.With | ast.AsyncWith) -> None:
        start = len(self.reading.findings)
        suppressed: frozenset[UseKind] = frozenset()
        for item in node.items:
            self.visit(item.context_expr)
            call = item.context_expr
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("suppress"):
                for argument in call.args:
                    suppressed |= _EXPECTED.get(ast.unparse(argument), frozenset())
            if item.optional_vars is not None:
                self._bind(item.optional_vars, UNKNOWN)
        self._block(node.body)
        kept = [f for f in self.reading.findings[start:] if f.kind not in suppressed]
        self.reading.findings[start:] = kept

    def _store(self, target: ast.expr, value: Value, source: ast.expr | None) -> None:
        if isinstance(target, ast.Attribute):
            owner = self.visit(target.value)
            self._patch(target, owner, target.attr, value)
        elif isinstance(target, ast.Tuple | ast.List):
            values: list[Value] = [UNKNOWN] * len(target.elts)
            if isinstance(source, ast.Tuple | ast.List) and len(source.elts) == len(target.elts):
                values = [self.program.evaluate(self.scope, e, self.local) for e in source.elts]
            for element, part in zip(target.elts, values, strict=True):
                self._store(element, part, None)
        else:
            if not isinstance(target, ast.Name):
                self.visit(target)
            self._bind(target, value)

    def _bind(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Name):
            if not self.is_local:
                return
            if self._depth and target.id in self._assigned and self.local.get(target.id) != value:
                value = UNKNOWN
            self._assigned.add(target.id)
            self.local[target.id] = UNKNOWN if isinstance(value, Missing) else value
        elif isinstance(target, ast.Tuple | ast.List):
            for element in target.elts:
                self._bind(element, UNKNOWN)
        elif isinstance(target, ast.Starred):
            self._bind(target.value, UNKNOWN)

    # Conditions

    def _truth(self, test: ast.expr) -> bool | None:
        match test:
            case ast.UnaryOp(op=ast.Not()):
                inner = self._truth(test.operand)
                return None if inner is None else not inner
            case ast.BoolOp():
                values = [self._truth(value) for value in test.values]
                deciding = isinstance(test.op, ast.Or)
                if deciding in values:
                    return deciding
                return None if None in values else not deciding
            case ast.Call(func=ast.Name(id="hasattr"), args=[owner, ast.Constant(value=str(name))]):
                value = self.program.evaluate(self.scope, owner, self.local)
                found = self.program.attribute(value, name)
                if isinstance(found, Missing):
                    return False
                return None if isinstance(found, Unknown) else True
        return self.program.truth(test)

    def _narrowed(self, test: ast.expr) -> list[tuple[str, Value]]:
        """Return local names with their classes where ``test`` is true."""
        found: list[tuple[str, Value]] = []
        parts = test.values if isinstance(test, ast.BoolOp) else [test]
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):
            return []
        for part in parts:
            match part:
                case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Name() as name, classes]):
                    value = self.program.evaluate(self.scope, classes, self.local)
                    found.append(
                        (name.id, Instance(value) if isinstance(value, Class) else UNKNOWN)
                    )
        return found

    # Expressions

    def visit(self, node: ast.expr) -> Value:
        """Report the faults of an expression and its parts, and return its value."""
        match node:
            case ast.Attribute():
                return self._attribute(node)
            case ast.Call():
                return self._call(node)
            case ast.Subscript():
                value = self.visit(node.value)
                self.visit(node.slice)
                if isinstance(value, Items):
                    return UNKNOWN if isinstance(node.slice, ast.Slice) else value.item
                return value if isinstance(value, Class) else UNKNOWN
            case ast.Lambda():
                names: dict[str, Value] = {a.arg: UNKNOWN for a in _arguments(node.args)}
                self._inner(names).visit(node.body)
                return UNKNOWN
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return self._comprehension(node)
            case ast.NamedExpr():
                value = self.visit(node.value)
                self._bind(node.target, value)
                return value
            case ast.BoolOp():
                return self._bool_op(node)
            case ast.IfExp():
                return self._if_expression(node)
            case ast.Constant() | ast.JoinedStr():
                self._declared_string(node)
                return UNKNOWN
            case ast.Name():
                return self.program.evaluate(self.scope, node, self.local)
            case ast.Starred():
                self.visit(node.value)
                return UNKNOWN
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.visit(child)
        return UNKNOWN

    def _inner(self, names: dict[str, Value]) -> _Walker:
        """Return a walker for a nested scope with further local names."""
        walker = _Walker(
            self.program,
            self.scope,
            self.reading,
            {**self.local, **names},
            self.owner,
            self.checked,
        )
        walker._assigned = set(names)
        return walker

    def _comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
    ) -> Value:
        walker = self._inner({})
        for generator in node.generators:
            item = _item(walker.visit(generator.iter))
            walker._bind(generator.target, item)
            for condition in generator.ifs:
                walker.visit(condition)
        if isinstance(node, ast.DictComp):
            key, value = walker.visit(node.key), walker.visit(node.value)
            return Items(value, key, is_mapping=True)
        return Items(walker.visit(node.elt))

    def _bool_op(self, node: ast.BoolOp) -> Value:
        decided = None
        values = []
        for part in node.values:
            # The second part of `hasattr(x, "y") and x.y` runs only if the first is true.
            start = len(self.reading.findings)
            values.append(self.visit(part))
            stops = isinstance(node.op, ast.Or)
            if decided is stops:
                del self.reading.findings[start:]
            else:
                decided = self._truth(part)
        return values[0] if all(value == values[0] for value in values) else UNKNOWN

    def _if_expression(self, node: ast.IfExp) -> Value:
        self.visit(node.test)
        decided = self._truth(node.test)
        start = len(self.reading.findings)
        first = self.visit(node.body)
        if decided is False:
            del self.reading.findings[start:]
        start = len(self.reading.findings)
        second = self.visit(node.orelse)
        if decided is True:
            del self.reading.findings[start:]
            return first
        if decided is False:
            return second
        return first if first == second else UNKNOWN

    def _attribute(self, node: ast.Attribute) -> Value:
        owner = self.visit(node.value)
        value = self.program.attribute(owner, node.attr)
        target = self._target(owner, node.attr)
        if target:
            self._use(node, UseKind.ATTRIBUTE, target)
            is_faulty = isinstance(value, Missing) and node.attr not in self.checked
            # An object of an annotated class may be one of the plugin's own subclass.
            if is_faulty and isinstance(owner, Instance):
                is_faulty = not self.program.plugin_defines(owner.cls, node.attr)
            if isinstance(value, Missing) and is_faulty:
                self._report(
                    node,
                    UseKind.ATTRIBUTE,
                    node.attr,
                    value.text,
                    value.is_definite and isinstance(owner, Module | Class),
                )
        return UNKNOWN if isinstance(value, Missing) else value

    def _target(self, owner: Value, name: str) -> str:
        """Return ``module:name`` of an attribute of the host, "" if it is not the host's."""
        match owner:
            case Module():
                return f"{owner.name}:{name}" if self.program.is_host(owner.name) else ""
            case Class() | Instance() | SuperOf():
                cls = owner if isinstance(owner, Class) else owner.cls
                after = cls if isinstance(owner, SuperOf) else None
                defining = self.program.owner(cls, name, after)
                if defining is not None:
                    return f"{defining.target}.{name}" if defining.scope.is_host else ""
                hosts = [c for c in self.program.order(cls)[0] if c.scope.is_host]
                return f"{hosts[0].target}.{name}" if hosts else ""
        return ""

    def _call(self, node: ast.Call) -> Value:
        match node:
            case ast.Call(func=ast.Name(id="super"), args=[]):
                return SuperOf(self.owner) if self.owner is not None else UNKNOWN
            case ast.Call(
                func=ast.Name(id="setattr"), args=[owner, ast.Constant(value=str(name)), value]
            ):
                self._patch(node, self.visit(owner), name, self.visit(value))
                return UNKNOWN
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str(name))]):
                found = self.program.attribute(self.visit(owner), name)
                return UNKNOWN if isinstance(found, Missing) else found
        function = self.visit(node.func)
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            if not self._declared_member(node, argument):
                self.visit(argument)
        if isinstance(function, Class | Function) and function.scope.is_host:
            self._use(node, UseKind.CALL, function.target)
            signature = self.program.signature(function)
            reason = signature.refusal(CallShape.of(node)) if signature is not None else ""
            if reason and not self._is_own_method(node.func, function):
                # A subclass, such as the plugin's own, may take other arguments than the class of
                # an annotation.
                is_certain = isinstance(function, Class) or not function.is_bound
                name = function.target.rpartition(":")[2]
                reason = f"{function.target} {reason}"
                self._report(node, UseKind.CALL, name, reason, is_certain)
        return self.program.call(function)

    def _is_own_method(self, expression: ast.expr, function: Value) -> bool:
        """Return whether a method of an annotated object may be that of the plugin's subclass."""
        if not isinstance(expression, ast.Attribute) or not isinstance(function, Function):
            return False
        owner = self.program.evaluate(self.scope, expression.value, self.local)
        return isinstance(owner, Instance) and self.program.plugin_defines(
            owner.cls, expression.attr
        )

    # Overrides and patches

    def _check_overrides(self, cls: Class) -> None:
        classes, _ = self.program.order(cls)
        if not any(c.scope.is_host for c in classes[1:]):
            return
        for name, bindings in self.program.members(cls).bindings.items():
            node = bindings[-1].node
            if not isinstance(node, FunctionNode):
                continue
            base = self.program.owner(cls, name, after=cls)
            if base is None and not name.startswith("__") and not self.program.plugin_calls(name):
                text = "no base class of the host has it, so the host never calls it"
                self._report(node, UseKind.OVERRIDE, f"{cls.name}.{name}", text, False)
            elif base is not None and base.scope.is_host:
                self._use(node, UseKind.OVERRIDE, f"{base.target}.{name}")
                original = self.program.member(cls, name, bound=True, after=cls)
                mine = self.program.member(cls, name, bound=True)
                self._compare(node, UseKind.OVERRIDE, f"{cls.name}.{name}", mine, original)
        for name, owner in self.program.abstract_methods(cls).items():
            if owner.scope.is_host:
                text = f"{owner.target}.{name} is abstract and not implemented"
                self._report(cls.node, UseKind.ABSTRACT, f"{cls.name}.{name}", text, False)

    def _patch(self, node: ast.expr, owner: Value, name: str, value: Value) -> None:
        is_host = (isinstance(owner, Module) and self.program.is_host(owner.name)) or (
            isinstance(owner, Class) and owner.scope.is_host
        )
        if not is_host:
            return
        original = self.program.attribute(owner, name)
        target = self._target(owner, name)
        self._use(node, UseKind.PATCH, target)
        if isinstance(original, Missing):
            text = f"{original.text}, so the host never reads the new value"
            self._report(node, UseKind.PATCH, name, text, False)
        else:
            self._compare(node, UseKind.PATCH, name, value, original)

    def _compare(
        self, node: ast.AST, kind: UseKind, name: str, mine: Value, original: Value
    ) -> None:
        """Report calls of the host that ``original`` accepts and its replacement does not."""
        if not isinstance(mine, Function) or not isinstance(original, Function):
            return
        if kind == UseKind.OVERRIDE and original.node.name == "__init__":
            # The plugin itself mostly builds its classes, with its own arguments.
            return
        if mine.scope.is_host:
            return
        own, base = self.program.signature(mine), self.program.signature(original)
        if own is None or base is None:
            return
        if kind == UseKind.PATCH and original.owner is not None and not original.is_bound:
            own, base = own.bound(), base.bound()
        self.reading.originals[self.scope.file, _line(node), name] = str(base)
        # A plugin that calls its own method with other arguments has its own use for the method.
        is_own = any(
            base.refusal(shape) and not own.refusal(shape)
            for shape in self.program.plugin_calls(original.node.name)
        )
        reason = own.refusal(base.required_call())
        if reason and not is_own and not base.is_variadic:
            text = f"{reason}; the host's is {original.target}{base}"
            self._report(node, kind, name, text, False)
            return
        names = {parameter.name for parameter in base.parameters}
        for shape, position in self.program.host_calls(original.node.name):
            if base.refusal(shape) or not shape.keywords <= names:
                continue
            if reason := own.refusal(shape):
                text = f"{reason}; the host calls it so in {position}"
                self._report(node, kind, name, text, False)

    # Declarations

    def _declared_string(self, node: ast.expr) -> None:
        text = self._fold(node)
        if text is None or not self._is_target(text):
            return
        value = self._resolve(text)
        if isinstance(value, Missing):
            self._report(node, UseKind.DECLARED, text, value.text, ":" in text)
        elif not isinstance(value, Unknown):
            self._use(node, UseKind.DECLARED, text)

    def _declared_member(self, call: ast.Call, argument: ast.expr) -> bool:
        """Compare the signature in a call such as ``HostMember("module:name", "(self, x)")``."""
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        if argument is not arguments[0] or len(arguments) < 2:
            return False
        target, expected = self._fold(arguments[0]), self._fold(arguments[1])
        if target is None or expected is None or not self._is_target(target):
            return False
        signature = Signature.parse(expected)
        value = self._resolve(target)
        found = self.program.signature(value)
        if signature is None or ":" not in target:
            return False
        self._use(call, UseKind.DECLARED, target)
        if isinstance(value, Missing):
            self._report(call, UseKind.DECLARED, target, value.text)
        elif found is not None and (reason := found.difference(signature)):
            self._report(call, UseKind.DECLARED, target, f"{target} {reason}")
        return True

    def _is_target(self, text: str) -> bool:
        pattern = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+(:[A-Za-z_]\w*(\.\w+)*)?|[A-Za-z_]\w*:\w+(\.\w+)*"
        return self.program.is_host(text.partition(":")[0]) and bool(re.fullmatch(pattern, text))

    def _resolve(self, text: str) -> Value:
        """Return the value of ``module:name.name`` or ``module.name``."""
        module, colon, path = text.partition(":")
        if not colon:
            parts = module.split(".")
            count = next(
                (
                    n
                    for n in range(len(parts), 0, -1)
                    if self.program.host.has_package(".".join(parts[:n]))
                ),
                0,
            )
            module, path = ".".join(parts[:count]), ".".join(parts[count:])
        value = self.program.module(module) if module else Missing(f"there is no module {text}")
        for part in path.split(".") if path else ():
            if isinstance(value, Missing | Unknown):
                break
            value = self.program.attribute(value, part)
        return value

    def _fold(self, node: ast.AST | None, scope: ModuleScope | None = None) -> str | None:
        """Return the text of a string expression that is made of constants, otherwise None."""
        scope = scope or self.scope
        match node:
            case ast.Constant(value=str(text)):
                return text
            case ast.JoinedStr():
                parts = [
                    self._fold(p.value if isinstance(p, ast.FormattedValue) else p, scope)
                    for p in node.values
                ]
                return None if None in parts else "".join(part for part in parts if part)
            case ast.Name() if node.id not in self.local:
                bindings = scope.bindings.get(node.id, ())
                return self._fold(bindings[0].node, scope) if len(bindings) == 1 else None
        return None

    # Results

    def _use(self, node: ast.AST, kind: UseKind, target: str) -> None:
        self.reading.uses.add(Use(self.scope.file, _line(node), kind, target))

    def _report(
        self, node: ast.AST, kind: UseKind, name: str, reason: str, is_definite: bool = True
    ) -> None:
        finding = Finding(
            self.scope.file,
            _line(node),
            getattr(node, "end_col_offset", 0),
            kind,
            name,
            reason,
            is_definite,
        )
        if finding not in self.reading.findings:
            self.reading.findings.append(finding)


def _line(node: ast.AST) -> int:
    # The end of a chain such as `a.b.c` is where its last name stands.
    if isinstance(node, ast.Attribute):
        return node.end_lineno or node.lineno
    return int(getattr(node, "lineno", 1))


def _item(value: Value) -> Value:
    if isinstance(value, Items):
        return value.key if value.is_mapping else value.item
    return UNKNOWN


def _arguments(arguments: ast.arguments) -> Iterator[ast.arg]:
    yield from (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    yield from (extra for extra in (arguments.vararg, arguments.kwarg) if extra is not None)


def _checked_names(function: FunctionNode) -> frozenset[str]:
    """Return the attributes whose presence a function checks by ``hasattr`` or ``getattr``."""
    names = set()
    for node in ast.walk(function):
        match node:
            case ast.Call(
                func=ast.Name(id="hasattr" | "getattr"), args=[_, ast.Constant(value=str(name)), *_]
            ):
                names.add(name)
    return frozenset(names)


def _expected_kinds(handler: ast.ExceptHandler) -> frozenset[UseKind]:
    """Return the kinds of findings that a handler catches without raising again."""
    if any(isinstance(node, ast.Raise) for node in ast.walk(handler)):
        return frozenset()
    if handler.type is None:
        return frozenset(UseKind)
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    kinds: frozenset[UseKind] = frozenset()
    for exception in types:
        kinds |= _EXPECTED.get(ast.unparse(exception).rpartition(".")[2], frozenset())
    return kinds
