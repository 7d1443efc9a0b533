"""The levels of this process's loggers under Kafka's names for them, read and changed while the broker runs.

Kafka's root is the logger above all of Headrace's; the others have their module's dotted name. A level lasts until the
process ends. Called by the handlers of settings for the BROKER_LOGGER resource.
"""

import logging

ROOT = "root"
PACKAGE = "headrace"
LEVELS = {
    "TRACE": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERROR": logging.ERROR,
    "FATAL": logging.CRITICAL,
}
_NAMES = {level: name for name, level in LEVELS.items()}


def logger_levels() -> dict[str, str]:
    """The level in force for each logger there is."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith(PACKAGE + ".")]
    return {ROOT: _level(PACKAGE)} | {name: _level(name) for name in names}


def set_logger_level(name: str, level: str | None) -> None:
    """Change a logger's level; None gives it that of the logger above it."""
    logger = logging.getLogger(PACKAGE if name == ROOT else name)
    logger.setLevel(logging.NOTSET if level is None else LEVELS[level])


def _level(name: str) -> str:
    return _NAMES.get(logging.getLogger(name).getEffectiveLevel(), "INFO")
