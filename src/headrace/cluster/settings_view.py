"""What the settings of a resource are and where each value comes from, as DescribeConfigs tells it.

Pure: reads the image, which holds what was set while running, and the broker's own configuration. A value comes from
the most specific place that has one; the places that are passed over are its synonyms, most specific first. Called by
the handlers of settings and, for the reply to CreateTopics, of topics.
"""

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import NamedTuple

from headrace.base.settings import BROKER_SETTINGS, TOPIC_SETTINGS, BrokerConfig, ConfigType, Setting
from headrace.base.settings_group import CLIENT_METRICS_SETTINGS, GROUP_SETTINGS
from headrace.base.settings_types import render
from headrace.cluster.image import BROKER_RESOURCE, ClusterImage
from headrace.cluster.settings_control import Resource

UNKNOWN_TYPE = 0
LISTENER_NAME = "PLAINTEXT"


class Source(IntEnum):
    """Where a value comes from, with Kafka's numbers."""

    TOPIC = 1
    DYNAMIC_BROKER = 2
    DYNAMIC_DEFAULT_BROKER = 3
    STATIC_BROKER = 4
    DEFAULT = 5
    DYNAMIC_BROKER_LOGGER = 6
    CLIENT_METRICS = 7
    GROUP = 8


class Synonym(NamedTuple):
    """A place that has a value for a key, under the name it has there."""

    name: str
    value: str | None
    source: Source


class Entry(NamedTuple):
    """One key of a resource, with its effective value."""

    name: str
    value: str | None
    source: Source
    read_only: bool
    sensitive: bool
    type: int
    documentation: str
    synonyms: tuple[Synonym, ...]


class SettingsView:
    """The settings of every resource, as one broker sees them on one image."""

    def __init__(self, image: ClusterImage, config: BrokerConfig, node_id: int) -> None:
        self._image = image
        self._config = config
        self._places: tuple[tuple[Source, Mapping[str, str]], ...] = (
            (Source.DYNAMIC_BROKER, image.config(BROKER_RESOURCE, str(node_id))),
            (Source.DYNAMIC_DEFAULT_BROKER, image.config(BROKER_RESOURCE, "")),
            (Source.STATIC_BROKER, {**_registered(image, node_id), **config.static_values}),
        )

    def topic(self, overrides: Mapping[str, str], names: Iterable[str] | None = None) -> list[Entry]:
        """A topic with these overrides."""
        return self._inherited(TOPIC_SETTINGS, overrides, Source.TOPIC, names)

    def group(self, name: str, names: Iterable[str] | None = None) -> list[Entry]:
        """A group, whether or not it exists: what it has, or would have."""
        return self._inherited(GROUP_SETTINGS, self._image.config(Resource.GROUP, name), Source.GROUP, names)

    def client_metrics(self, name: str, names: Iterable[str] | None = None) -> list[Entry]:
        """A subscription to client metrics."""
        values = self._image.config(Resource.CLIENT_METRICS, name)
        return self._inherited(CLIENT_METRICS_SETTINGS, values, Source.CLIENT_METRICS, names)

    def broker(self, names: Iterable[str] | None = None) -> list[Entry]:
        """This broker. Keys set while running that no table declares are listed without their values."""
        unknown = [name for _, values in self._places for name in values if name not in BROKER_SETTINGS]
        return [
            self._broker_entry(name) for name in _chosen({**BROKER_SETTINGS, **dict.fromkeys(unknown)}, names)
        ]

    def all_brokers(self, names: Iterable[str] | None = None) -> list[Entry]:
        """What was set while running for all brokers, and nothing else."""
        values = self._places[1][1]
        entries = []
        for name in _chosen(values, names):
            setting = BROKER_SETTINGS.get(name)
            shown = None if setting is None else setting.canonical(values[name])
            synonym = Synonym(name, shown, Source.DYNAMIC_DEFAULT_BROKER)
            entries.append(_broker_entry(name, shown, (synonym,)))
        return entries

    def _inherited(
        self,
        table: Mapping[str, Setting],
        overrides: Mapping[str, str],
        source: Source,
        names: Iterable[str] | None,
    ) -> list[Entry]:
        entries = []
        for name in _chosen(table, names):
            setting = table[name]
            synonyms: tuple[Synonym, ...] = ()
            if setting.synonyms and setting.synonyms[0] in BROKER_SETTINGS:
                synonyms = self._synonyms(setting.synonyms[0])
            if name in overrides:
                value = setting.canonical(overrides[name])
                synonyms = (Synonym(name, value, source), *synonyms)
            else:
                value = self._inherited_value(setting)
            found = synonyms[0].source if synonyms else Source.DEFAULT
            entries.append(
                Entry(
                    name,
                    value,
                    found,
                    False,
                    setting.sensitive,
                    setting.type,
                    setting.documentation,
                    synonyms,
                )
            )
        return entries

    def _inherited_value(self, setting: Setting) -> str | None:
        if setting.type is ConfigType.LIST and setting.synonyms:
            value = getattr(self._config, BROKER_SETTINGS[setting.synonyms[0]].attribute)
        elif setting.name in TOPIC_SETTINGS:
            value = getattr(self._config.topic_defaults, setting.attribute)
        elif setting.synonyms:
            value = getattr(self._config, BROKER_SETTINGS[setting.synonyms[0]].attribute)
        else:
            value = setting.default
        return render(setting.type, value)

    def _broker_entry(self, name: str) -> Entry:
        setting = BROKER_SETTINGS.get(name)
        if setting is None or setting.sensitive:
            return _broker_entry(name, None, self._synonyms(name))
        synonyms = self._synonyms(name)
        if synonyms and synonyms[0].source is Source.STATIC_BROKER:
            value = synonyms[0].value
        else:
            value = render(setting.type, getattr(self._config, setting.attribute))
        return _broker_entry(name, value, synonyms)

    def _synonyms(self, name: str) -> tuple[Synonym, ...]:
        """Every place that has a value for a broker's key or for a coarser one it falls back to.

        As in Kafka, the list begins at the key itself: a value that is only there under a coarser name is not listed.
        """
        setting = BROKER_SETTINGS.get(name)
        family = (name,) if setting is None else (name, *setting.synonyms)
        found: list[Synonym] = []
        for source, values in self._places:
            for member in family:
                if member in values:
                    known = BROKER_SETTINGS.get(member)
                    shown = None if known is None else known.canonical(values[member])
                    found.append(Synonym(member, shown, source))
        for member in family:
            known = BROKER_SETTINGS.get(member)
            if known is not None and known.default is not None:
                found.append(Synonym(member, known.default_text, Source.DEFAULT))
        start = next((index for index, synonym in enumerate(found) if synonym.name == name), len(found))
        return tuple(found[start:])


def _registered(image: ClusterImage, node_id: int) -> dict[str, str]:
    """What a broker knows of itself without being told: its number, and where it said clients reach it."""
    values = {"node.id": str(node_id), "broker.id": str(node_id)}
    if (broker := image.brokers.get(node_id)) is not None:
        host = f"[{broker.host}]" if ":" in broker.host else broker.host
        values["advertised.listeners"] = f"{LISTENER_NAME}://{host}:{broker.port}"
    return values


def _broker_entry(name: str, value: str | None, synonyms: tuple[Synonym, ...]) -> Entry:
    setting = BROKER_SETTINGS.get(name)
    source = synonyms[0].source if synonyms else Source.DEFAULT
    if setting is None:
        return Entry(name, None, source, True, True, UNKNOWN_TYPE, "", synonyms)
    return Entry(
        name,
        value,
        source,
        not setting.reload,
        setting.sensitive,
        setting.type,
        setting.documentation,
        synonyms,
    )


def _chosen(table: Mapping[str, object], names: Iterable[str] | None) -> list[str]:
    """The keys to tell, in order: all of them when none are named."""
    wanted = set(names or ())
    return sorted(name for name in table if not wanted or name in wanted)
