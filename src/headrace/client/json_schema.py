"""Whether a JSON value fits a JSON Schema, for the keywords that schemas of records are made of.

Owns the check. Keywords: type, enum, const, properties, required, additionalProperties, patternProperties,
minProperties, maxProperties, items, prefixItems, minItems, maxItems, uniqueItems, contains, minLength, maxLength,
pattern, minimum, maximum, exclusiveMinimum, exclusiveMaximum, multipleOf, allOf, anyOf, oneOf, not, if/then/else, and
$ref to a place in the same schema. Annotations (title, description, format …) are let through; any other keyword is
refused, because a rule that is not checked must not look as if it were. Pure. Called by `serializers`.
"""

import re
from collections.abc import Mapping
from typing import Any

DEPTH_MAX = 100

_ANNOTATIONS = frozenset(
    {
        *("$schema", "$id", "$comment", "$defs", "$anchor", "definitions", "title", "description", "default"),
        *("examples", "format", "deprecated", "readOnly", "writeOnly", "contentEncoding", "contentMediaType"),
        *("then", "else"),
    }
)
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (Mapping,),
    "array": (list, tuple),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}


def check_json(schema: Any, value: Any) -> None:
    """Raise ValueError, with the place and the reason, when the value does not fit."""
    reason = _misfit(schema, value, schema, "$", 0)
    if reason is not None:
        raise ValueError(reason)


def _misfit(schema: Any, value: Any, root: Any, at: str, depth: int) -> str | None:
    """Why the value does not fit, or None."""
    if depth > DEPTH_MAX:
        return f"{at}: more than {DEPTH_MAX} levels deep"
    if isinstance(schema, bool):
        return None if schema else f"{at}: nothing is allowed here"
    for keyword, rule in schema.items():
        if keyword in _ANNOTATIONS:
            continue
        check = _RULES.get(keyword)
        if check is None:
            return f"{at}: the schema's keyword {keyword!r} is not supported"
        reason: str | None = check(rule, value, schema, root, at, depth + 1)
        if reason is not None:
            return reason
    return None


def _type(rule: Any, value: Any, schema: Any, root: Any, at: str, depth: int) -> str | None:
    names = [rule] if isinstance(rule, str) else rule
    for name in names:
        fits = isinstance(value, _TYPES[name]) or (
            name == "integer" and isinstance(value, float) and value.is_integer()
        )
        if fits and not (isinstance(value, bool) and name in ("integer", "number")):
            return None
    return f"{at}: {_shown(value)} is not of type {' or '.join(names)}"


def _enum(rule: Any, value: Any, schema: Any, root: Any, at: str, depth: int) -> str | None:
    return None if any(_same(value, one) for one in rule) else f"{at}: {_shown(value)} is none of {rule}"


def _const(rule: Any, value: Any, schema: Any, root: Any, at: str, depth: int) -> str | None:
    return None if _same(value, rule) else f"{at}: {_shown(value)} is not {rule!r}"


def _properties(rule: Any, value: Any, schema: Any, root: Any, at: str, depth: int) -> str | None:
    if not isinstance(value, Mapping):
        return None
    for name, inner in rule.items():
        if name in value and (reason := _misfit(inner, value[name], root, f"{at}.{name}", depth)):
            return reason
    return None


def _pattern_properties(rule: Any, value: Any, schema: Any, root: Any, at: str, depth: int) -> str | None:
    if not isinstance(value, Mapping):
        return None
    for pattern, inner in rule.items():
        for name, item in value.items():
            if re.search(pattern, name) and (reason := _misfit(inner, item, root, f"{at}.{name}", depth)):
                return reason
    return None


def _additional(rule: Any, value: Any, schema: Any, root: Any, at: str, depth: int) -> str | None:
    if not isinstance(value, Mapping):
        return None
    known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for name, item in value.items():
        if name in known or any(re.search(pattern, name) for pattern in patterns):
            continue
        if rule is False:
            return f"{at}: there is no property {name!r}"
        if reason := _misfit(rule, item, root, f"{at}.{name}", depth):
            return reason
    return None


def _required(rule: Any, value: Any, schema: Any, root: Any, at: str, depth: int) -> str | None:
    if not isinstance(value, Mapping):
        return None
    missing = [name for name in rule if name not in value]
    return f"{at}: {missing[0]!r} is missing" if missing else None


def _items(rule: Any, value: Any, schema: Any, root: Any, at: str, depth: int) -> str | None:
    if not isinstance(value, list | tuple):
        return None
    if isinstance(rule, list):  # the form of drafts before 2020-12
        return _prefix_items(rule, value, schema, root, at, depth)
    for number in range(len(schema.get("prefixItems", ())), len(value)):
        if reason := _misfit(rule, value[number], root, f"{at}[{number}]", depth):
            return reason
    return None


def _prefix_items(rule: Any, value: Any, schema: Any, root: Any, at: str, depth: int) -> str | None:
    if not isinstance(value, list | tuple):
        return None
    for number, (inner, item) in enumerate(zip(rule, value)):
        if reason := _misfit(inner, item, root, f"{at}[{number}]", depth):
            return reason
    return None


def _unique(rule: Any, value: Any, schema: Any, root: Any, at: str, depth: int) -> str | None:
    if not rule or not isinstance(value, list | tuple):
        return None
    for number, item in enumerate(value):
        if any(_same(item, other) for other in value[:number]):
            return f"{at}[{number}]: {_shown(item)} is there twice"
    return None


def _contains(rule: Any, value: Any, schema: Any, root: Any, at: str, depth: int) -> str | None:
    if not isinstance(value, list | tuple) or any(_misfit(rule, v, root, at, depth) is None for v in value):
        return None
    return f"{at}: no item is as asked for"


def _measured(kind: tuple[type, ...], measure: Any, fits: Any, words: str) -> Any:
    def check(rule: Any, value: Any, schema: Any, root: Any, at: str, depth: int) -> str | None:
        if not isinstance(value, kind) or isinstance(value, bool) or fits(measure(value), rule):
            return None
        return f"{at}: {_shown(value)} {words} {rule}"

    return check


def _text_pattern(rule: Any, value: Any, schema: Any, root: Any, at: str, depth: int) -> str | None:
    if not isinstance(value, str) or re.search(rule, value):
        return None
    return f"{at}: {_shown(value)} does not match {rule!r}"


def _all_of(rule: Any, value: Any, schema: Any, root: Any, at: str, depth: int) -> str | None:
    return next((r for inner in rule if (r := _misfit(inner, value, root, at, depth))), None)


def _any_of(rule: Any, value: Any, schema: Any, root: Any, at: str, depth: int) -> str | None:
    reasons = [_misfit(inner, value, root, at, depth) for inner in rule]
    return None if None in reasons else f"{at}: fits none of {len(rule)} choices ({reasons[0]})"


def _one_of(rule: Any, value: Any, schema: Any, root: Any, at: str, depth: int) -> str | None:
    fitting = sum(_misfit(inner, value, root, at, depth) is None for inner in rule)
    return None if fitting == 1 else f"{at}: fits {fitting} of the choices, not one"


def _not(rule: Any, value: Any, schema: Any, root: Any, at: str, depth: int) -> str | None:
    return None if _misfit(rule, value, root, at, depth) else f"{at}: {_shown(value)} is what it must not be"


def _if(rule: Any, value: Any, schema: Any, root: Any, at: str, depth: int) -> str | None:
    branch = "then" if _misfit(rule, value, root, at, depth) is None else "else"
    return _misfit(schema.get(branch, True), value, root, at, depth)


def _ref(rule: Any, value: Any, schema: Any, root: Any, at: str, depth: int) -> str | None:
    if not rule.startswith("#"):
        return f"{at}: a $ref to another document ({rule}) is not supported"
    target = root
    for part in rule.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        target = target[int(name)] if isinstance(target, list) else target.get(name)
        if target is None:
            return f"{at}: the schema has no {rule}"
    return _misfit(target, value, root, at, depth)


def _same(one: Any, other: Any) -> bool:
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


_NUMBER: tuple[type, ...] = (int, float)
_ARRAY: tuple[type, ...] = (list, tuple)
_RULES: dict[str, Any] = {
    "type": _type,
    "enum": _enum,
    "const": _const,
    "properties": _properties,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional,
    "required": _required,
    "minProperties": _measured((Mapping,), len, lambda n, rule: n >= rule, "has fewer properties than"),
    "maxProperties": _measured((Mapping,), len, lambda n, rule: n <= rule, "has more properties than"),
    "items": _items,
    "prefixItems": _prefix_items,
    "minItems": _measured(_ARRAY, len, lambda n, rule: n >= rule, "has fewer items than"),
    "maxItems": _measured(_ARRAY, len, lambda n, rule: n <= rule, "has more items than"),
    "uniqueItems": _unique,
    "contains": _contains,
    "minLength": _measured((str,), len, lambda n, rule: n >= rule, "is shorter than"),
    "maxLength": _measured((str,), len, lambda n, rule: n <= rule, "is longer than"),
    "pattern": _text_pattern,
    "minimum": _measured(_NUMBER, lambda n: n, lambda n, rule: n >= rule, "is below"),
    "maximum": _measured(_NUMBER, lambda n: n, lambda n, rule: n <= rule, "is above"),
    "exclusiveMinimum": _measured(_NUMBER, lambda n: n, lambda n, rule: n > rule, "is not above"),
    "exclusiveMaximum": _measured(_NUMBER, lambda n: n, lambda n, rule: n < rule, "is not below"),
    "multipleOf": _measured(_NUMBER, lambda n: n, lambda n, rule: n % rule == 0, "is no multiple of"),
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
    "$ref": _ref,
}
