"""ApiVersions: what a client asks before it does anything else.

Lists what the router serves, and the features that the cluster knows and has finalized. From version 3 the client says
its name and version, which must look like names; before version 4 a feature that begins at 0 is not told of, because
older clients take that for an error.
"""

import re

from headrace.base.errors import ErrorCode
from headrace.cluster.features import FEATURES, finalized
from headrace.server.broker import Broker
from headrace.server.context import RequestContext
from headrace.server.router import Body, Handler
from headrace.wire.apis import SUPPORTED, Api
from headrace.wire.messages import Message

SOFTWARE_FROM = 3
ZERO_FEATURES_FROM = 4
SOFTWARE_LENGTH_MAX = 200

_SOFTWARE = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")


def handle_api_versions(broker: Broker, context: RequestContext, request: Message) -> Body:
    """The APIs and versions served here."""
    keys = [
        {"api_key": api, "min_version": first, "max_version": last}
        for api, (first, last) in SUPPORTED.items()
    ]
    named = (request.client_software_name, request.client_software_version)
    if context.version >= SOFTWARE_FROM and not all(map(_SOFTWARE.fullmatch, named)):
        return {"error_code": ErrorCode.INVALID_REQUEST, "throttle_time_ms": context.throttle_ms}
    context.peer.software = " ".join(named)[:SOFTWARE_LENGTH_MAX]
    return {
        "api_keys": keys,
        "throttle_time_ms": context.throttle_ms,
        "supported_features": [
            {"name": name, "min_version": feature.first, "max_version": feature.last}
            for name, feature in FEATURES.items()
            if feature.first > 0 or context.version >= ZERO_FEATURES_FROM
        ],
        "finalized_features_epoch": broker.metadata.committed_offset,
        "finalized_features": [
            {"name": name, "min_version_level": level, "max_version_level": level}
            for name, level in finalized(broker.image.features).items()
        ],
    }


HANDLERS: dict[Api, Handler] = {Api.API_VERSIONS: handle_api_versions}
