"""The broker settings of the cluster: who votes, how long silence is borne, who leads again.

Part of `BrokerConfig`, in a module of their own because they belong together.
"""

from headrace.base.settings_types import (
    AtLeast,
    BrokerIds,
    ConfigType,
    Configuration,
    EachOf,
    Reload,
    configuration,
    setting,
)

_BOOLEAN, _INT, _LIST = ConfigType.BOOLEAN, ConfigType.INT, ConfigType.LIST
_LONG = ConfigType.LONG
_LIVE = Reload.CLUSTER_WIDE
ROLES = ("broker", "controller")


@configuration
class ClusterConfig(Configuration):
    """The effective settings of a node as a member of its cluster."""

    controller_quorum_voters: tuple[str, ...] = setting(
        (),
        _LIST,
        "The controllers, as id@host:port; without any, this node is a cluster of its own.",
    )
    process_roles: tuple[str, ...] = setting(
        ROLES,
        _LIST,
        "What this process is: broker, controller, or both. Without the role of a controller in the list of voters, "
        "a node only follows the metadata.",
        bound=EachOf(ROLES),
    )
    controller_quorum_election_timeout_ms: int = setting(
        1_000,
        _INT,
        "How long a controller that hears nothing from the active one waits before it stands for election, and up to "
        "as long again by chance. One whose process is gone is replaced without that wait.",
        bound=AtLeast(150),
    )
    broker_heartbeat_interval_ms: int = setting(
        2_000, _INT, "How often a broker tells the active controller that it is there.", bound=AtLeast(50)
    )
    broker_session_timeout_ms: int = setting(
        9_000,
        _INT,
        "How long a broker may be silent before it is fenced. One whose process is gone is fenced at once.",
        bound=AtLeast(150),
    )
    controlled_shutdown_enable: bool = setting(
        True, _BOOLEAN, "Whether a broker that is told to stop first hands over what it leads."
    )
    balancer_enable: bool = setting(
        False,
        _BOOLEAN,
        "Whether the active controller moves leadership and replicas from brokers that measure much more load than "
        "the average (CPU, network, messages, disk) to those that measure least. It logs each move with its reason. "
        "Headrace's own.",
        reload=_LIVE,
    )
    balancer_interval_ms: int = setting(
        30_000,
        _LONG,
        "How long the balancer waits after each move, so that its effect is in the next measurement; in any case "
        "for three heartbeats. Headrace's own.",
        bound=AtLeast(100),
        reload=_LIVE,
    )
    balancer_tolerance_percentage: int = setting(
        20,
        _INT,
        "How far above the average a broker's load may be before something is moved away. Headrace's own.",
        bound=AtLeast(1),
        reload=_LIVE,
    )
    balancer_excluded_brokers: tuple[str, ...] = setting(
        (),
        _LIST,
        "Brokers that the balancer gives nothing to and takes nothing from. One that is drained belongs here before, "
        "or it is filled again as a new one is. Headrace's own.",
        bound=BrokerIds(),
        reload=_LIVE,
    )
    auto_leader_rebalance_enable: bool = setting(
        True, _BOOLEAN, "Whether leadership goes back to the preferred replicas by itself."
    )
    leader_imbalance_check_interval_seconds: int = setting(
        300, _LONG, "How often it is looked whether it should.", bound=AtLeast(1)
    )
    leader_imbalance_per_broker_percentage: int = setting(
        10,
        _INT,
        "The share of the partitions that prefer a broker which others may lead without leadership going back.",
        bound=AtLeast(0),
    )
