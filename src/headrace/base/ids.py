"""Topic, cluster and directory ids: 16 raw bytes inside, Kafka's url-safe base64 text outside."""

ID_SIZE = 16
ZERO_ID = bytes(ID_SIZE)


def format_id(raw: bytes) -> str:
    """The text form that Kafka's tools print: 22 characters of url-safe base64 without padding."""
    import base64  # not for clients, whose start it would slow down

    assert len(raw) == ID_SIZE
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def parse_id(text: str) -> bytes:
    """The raw form of an id in text; ValueError when it is not one."""
    import base64

    raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    if len(raw) != ID_SIZE:
        raise ValueError(f"{text!r} is not a 16-byte id in url-safe base64")
    return raw
