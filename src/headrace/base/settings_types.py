"""How a setting is declared, parsed, checked and shown; the tables themselves are in the modules beside this one.

A setting is a field of a configuration dataclass whose metadata carries everything else: type, bounds, reload scope,
synonyms, documentation. Its Kafka key is the field's name with dots (`retention_ms` is `retention.ms`), so the two
cannot drift apart. Parsing follows the rules of Kafka's own configuration definitions, including what it says when a
value is refused, because clients and suites compare those words.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from headrace.base.errors import ErrorCode, KafkaError

__all__ = [
    "INT_MAX",
    "LONG_MAX",
    "AtLeast",
    "Between",
    "Bound",
    "BrokerIds",
    "ConfigType",
    "Configuration",
    "EachOf",
    "LevelOrDefault",
    "OneOf",
    "Reload",
    "Setting",
    "ThrottledReplicas",
    "configuration",
    "declared",
    "java_list",
    "parsed",
    "render",
    "setting",
]

INT_MAX = 2**31 - 1
LONG_MAX = 2**63 - 1
NUMBER_CHARACTERS_MAX = 64


class ConfigType(IntEnum):
    """The type of a value, with the numbers that DescribeConfigs puts on the wire."""

    BOOLEAN = 1
    STRING = 2
    INT = 3
    SHORT = 4
    LONG = 5
    DOUBLE = 6
    LIST = 7
    CLASS = 8
    PASSWORD = 9


class Reload(IntEnum):
    """Whether a running broker takes a new value, and for whom it may be set."""

    READ_ONLY = 0
    PER_BROKER = 1
    CLUSTER_WIDE = 2


class Refusal(Exception):
    """Why a parsed value is not acceptable; `shown` is the part of it that is at fault."""

    def __init__(self, shown: object, reason: str) -> None:
        super().__init__(reason)
        self.shown = shown
        self.reason = reason


class Bound(Protocol):
    """What values a setting accepts."""

    def check(self, value: Any) -> None:
        """Return, or raise a `Refusal`."""
        ...


class Between:
    """A number with a floor and a ceiling."""

    __slots__ = ("high", "low")

    def __init__(self, low: int, high: int) -> None:
        self.low = low
        self.high = high

    def check(self, value: Any) -> None:
        if value < self.low:
            raise Refusal(value, f"Value must be at least {self.low}")
        if value > self.high:
            raise Refusal(value, f"Value must be no more than {self.high}")


class AtLeast(Between):
    """A number with a floor."""

    __slots__ = ()

    def __init__(self, low: int) -> None:
        super().__init__(low, LONG_MAX)


class LevelOrDefault(Between):
    """A compression level, or the one number that stands for the codec's own choice."""

    __slots__ = ("default",)

    def __init__(self, low: int, high: int, default: int) -> None:
        super().__init__(low, high)
        self.default = default

    def check(self, value: Any) -> None:
        if value != self.default and not self.low <= value <= self.high:
            raise Refusal(
                value, f"Value must be between {self.low} and {self.high} or equal to {self.default}"
            )


class OneOf:
    """A word out of a few."""

    __slots__ = ("words",)

    def __init__(self, words: tuple[str, ...]) -> None:
        self.words = words

    def check(self, value: Any) -> None:
        if value not in self.words:
            raise Refusal(value, f"String must be one of: {', '.join(self.words)}")


class EachOf(OneOf):
    """A list of words, each out of a few; what is given twice counts once, as in Kafka."""

    __slots__ = ()

    def check(self, value: Any) -> None:
        for word in value:
            super().check(word)


class BrokerIds:
    """A list of brokers by their ids."""

    __slots__ = ()

    def check(self, value: Any) -> None:
        for word in value:
            if not _is_integer(word) or not 0 <= int(word) <= INT_MAX:
                raise Refusal(word, "Value must be the id of a broker")


class ThrottledReplicas:
    """`*`, or pairs partition:broker."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def check(self, value: Any) -> None:
        if value == ("*",) or all(map(_is_replica_pair, value)):
            return
        pairs = "[partitionId]:[brokerId],[partitionId]:[brokerId],..."
        raise Refusal(
            java_list(value),
            f"{self.name} must be the literal '*' or a list of replicas in the following format: {pairs}",
        )


class Setting:
    """One declared setting."""

    __slots__ = (
        "attribute",
        "bound",
        "convert",
        "default",
        "doc",
        "name",
        "needs",
        "reload",
        "sensitive",
        "synonyms",
        "type",
    )

    def __init__(
        self,
        kind: ConfigType,
        default: Any,
        doc: str,
        bound: Bound | None,
        reload: Reload,
        synonyms: tuple[str, ...],
        sensitive: bool,
        needs: str,
        convert: Callable[[Any], Any] | None,
    ) -> None:
        self.name = ""
        self.attribute = ""
        """The field that holds its parsed value."""
        self.type = kind
        self.default = default
        self.doc = doc
        self.bound = bound
        self.reload = reload
        self.synonyms = synonyms
        self.sensitive = sensitive
        self.needs = needs
        self.convert = convert

    @property
    def default_text(self) -> str | None:
        """The default as DescribeConfigs shows it."""
        return render(self.type, self.default)

    @property
    def documentation(self) -> str:
        """What it does, and whether anything reads it yet."""
        return f"{self.doc} Takes effect with {self.needs}." if self.needs else self.doc

    def parse(self, text: str) -> Any:
        """The value a text stands for; INVALID_CONFIG with Kafka's words when it stands for none."""
        value = _parse(self.name, self.type, text.strip())
        if self.bound is not None:
            try:
                self.bound.check(value)
            except Refusal as refusal:
                raise invalid(self.name, refusal.shown, refusal.reason) from None
        return value

    def value(self, text: str) -> Any:
        """The value as the configuration dataclass holds it."""
        parsed = self.parse(text)
        return parsed if self.convert is None else self.convert(parsed)

    def canonical(self, text: str) -> str | None:
        """The text as DescribeConfigs shows it: parsed and printed again, as Kafka does."""
        return None if self.sensitive else render(self.type, self.parse(text))


@lru_cache(maxsize=16)
def _fields(cls: Any) -> tuple[Field[Any], ...]:
    """As `fields`, which looks at every field anew."""
    return fields(cls)


@lru_cache(maxsize=16)
def _defaults(cls: Any) -> tuple[tuple[str, Any, Any], ...]:
    """Each field's name, its default, and what makes one where there is none."""
    return tuple((each.name, each.default, each.default_factory) for each in fields(cls))


class Configuration:
    """What every configuration dataclass is: values by name, immutable, equal when its values are.

    The dataclass machinery would generate and compile the same methods for a hundred fields at every start, which costs
    more than all the rest of the tables together.
    """

    __slots__ = ()

    if not TYPE_CHECKING:

        def __init__(self, **values):
            given = 0
            put = object.__setattr__
            for name, default, factory in _defaults(type(self)):
                if name in values:
                    given += 1
                    put(self, name, values[name])
                else:
                    put(self, name, default if factory is MISSING else factory())
            if given != len(values):
                unknown = values.keys() - {name for name, *_ in _defaults(type(self))}
                raise TypeError(f"unknown settings: {', '.join(sorted(unknown))}")

        def __setattr__(self, name, value):
            raise AttributeError(f"a configuration does not change: {name}")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._compared() == other._compared()

    def __hash__(self) -> int:
        return hash(self._compared())

    def __repr__(self) -> str:
        changed = (
            f"{each.name}={getattr(self, each.name)!r}"
            for each in _fields(type(self))  # type: ignore[arg-type]
            if each.compare and getattr(self, each.name) != each.default
        )
        return f"{type(self).__name__}({', '.join(changed)})"

    def _compared(self) -> tuple[object, ...]:
        return tuple(getattr(self, each.name) for each in _fields(type(self)) if each.compare)  # type: ignore[arg-type]


if TYPE_CHECKING:
    from dataclasses import dataclass as configuration
else:

    def configuration(cls):
        """Make a `Configuration` of a class of declared settings."""
        return dataclass(init=False, repr=False, eq=False, slots=True)(cls)


def setting(
    default: Any,
    kind: ConfigType,
    doc: str,
    *,
    bound: Bound | None = None,
    reload: Reload = Reload.READ_ONLY,
    synonyms: tuple[str, ...] = (),
    sensitive: bool = False,
    needs: str = "",
    convert: Callable[[Any], Any] | None = None,
) -> Any:
    """Declare a setting as a field of a configuration. `default` is the parsed form, before `convert`."""
    entry = Setting(kind, default, doc, bound, reload, synonyms, sensitive, needs, convert)
    held = default if convert is None or default is None else convert(default)
    return field(default=held, metadata={"setting": entry})


def declared(cls: type) -> dict[str, Setting]:
    """The table of a configuration, by Kafka key."""
    table: dict[str, Setting] = {}
    for each in fields(cls):
        entry: Setting | None = each.metadata.get("setting")
        if entry is not None:
            entry.name = each.name.replace("_", ".")
            entry.attribute = each.name
            table[entry.name] = entry
    return table


def parsed(table: Mapping[str, Setting], texts: Mapping[str, str]) -> dict[str, Any]:
    """Field values for the keys of `texts` that the table declares."""
    return {table[name].attribute: table[name].value(text) for name, text in texts.items() if name in table}


def invalid(name: str, value: object, reason: str) -> KafkaError:
    """The refusal of a value, in Kafka's form."""
    shown = render(ConfigType.DOUBLE, value) if isinstance(value, float) else value
    return KafkaError(ErrorCode.INVALID_CONFIG, f"Invalid value {shown} for configuration {name}: {reason}")


def render(kind: ConfigType, value: Any) -> str | None:
    """A value as text, the way Kafka prints values of that type."""
    if value is None:
        return None
    if kind is ConfigType.BOOLEAN:
        return "true" if value else "false"
    if kind is ConfigType.LIST:
        return ",".join(value)
    if kind is ConfigType.DOUBLE:
        return _java_double(value)
    return str(value)


def java_list(items: tuple[str, ...]) -> str:
    """A list inside a message, as Kafka's messages show it."""
    return f"[{', '.join(items)}]"


_DOUBLE_SUFFIXES = ("f", "F", "d", "D")
_WIDTH = {ConfigType.SHORT: 2**15, ConfigType.INT: 2**31, ConfigType.LONG: 2**63}


def _parse(name: str, kind: ConfigType, text: str) -> Any:
    if kind in _WIDTH:
        value = int(text) if _is_integer(text) else None
        if value is None or not -_WIDTH[kind] <= value < _WIDTH[kind]:
            raise invalid(name, text, f"Not a number of type {kind.name}")
        return value
    if kind is ConfigType.BOOLEAN:
        lowered = text.lower()
        if lowered not in ("true", "false"):
            raise invalid(name, text, "Expected value to be either true or false")
        return lowered == "true"
    if kind is ConfigType.DOUBLE:
        try:
            return float(text[:-1] if text[-1:] in _DOUBLE_SUFFIXES and text[-2:-1].isdigit() else text)
        except ValueError:
            raise invalid(name, text, "Not a number of type DOUBLE") from None
    if kind is ConfigType.LIST:
        return tuple(item.strip() for item in text.split(",")) if text else ()
    return text


def _is_integer(text: str) -> bool:
    digits = text[1:] if text[:1] in ("+", "-") else text
    return digits.isascii() and digits.isdigit() and len(digits) <= NUMBER_CHARACTERS_MAX


def _is_replica_pair(text: str) -> bool:
    partition, colon, broker = text.partition(":")
    return (
        colon == ":"
        and _is_integer(partition)
        and _is_integer(broker)
        and "+" not in text
        and "-" not in text
    )


def _java_double(value: float) -> str:
    """Java prints plain decimals from a thousandth to ten million, and a capital E outside."""
    if value != value or value in (float("inf"), float("-inf")):
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[repr(value)]
    if value == 0 or 1e-3 <= abs(value) < 1e7:
        return repr(float(value))
    sign = "-" if value < 0 else ""
    base, _, power = repr(abs(value)).partition("e")
    whole, _, fraction = base.partition(".")
    digits = (whole + fraction).lstrip("0")
    exponent = int(power or 0) + len(whole) - 1 - (len(whole + fraction) - len(digits))
    digits = digits.rstrip("0")
    return f"{sign}{digits[0]}.{digits[1:] or '0'}E{exponent}"
