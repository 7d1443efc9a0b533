"""Leaders and followers under loss, delay, deaths and power cuts: what was acknowledged stays, in one order."""

import errno

import pytest

from headrace.storage.faulty import FaultyFileSystem
from tests.replication.village import SETTINGS, TOPIC, Village

SEEDS = 40


def live(village: Village, rounds: int, *, power_cuts: bool) -> None:
    """Produce while things happen, more often than anyone would like."""
    rng = village.rng
    for _ in range(rounds):
        dice = rng.random()
        node = rng.choice(list(village.houses))
        if dice < 0.70:
            for _ in range(rng.randint(1, 4)):
                village.produce()
        elif dice < 0.76:
            village.kill(node, power_cut=power_cuts and rng.random() < 0.5)
        elif dice < 0.86:
            village.revive(node)
        elif dice < 0.89:
            village.cut_off.add(node)
        elif dice < 0.94:
            village.cut_off.discard(node)
        elif dice < 0.95:
            village.ambush = True
        elif dice < 0.97:
            village.fence(node)  # a controller may be wrong about a broker that is only slow
        else:
            village.lossy = rng.choice([0.0, 0.0, 0.1, 0.4])
        village.run(rng.choice([0, 1, 5, 30, 200, 1_500]))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_nothing_acknowledged_is_lost_whoever_dies(seed):
    village = Village(seed, min_insync_replicas="2")
    village.run(500)
    live(village, 120, power_cuts=False)
    village.settle()
    village.produce()
    village.run(500)
    assert village.acked, "life goes on"


@pytest.mark.parametrize("seed", range(SEEDS))
def test_nothing_acknowledged_is_lost_with_the_power_where_records_are_flushed_first(seed):
    village = Village(seed, min_insync_replicas="2", flush_messages="1")
    village.run(500)
    live(village, 120, power_cuts=True)
    village.settle()
    village.produce()
    village.run(500)
    assert village.acked, "life goes on"


def test_a_follower_that_is_idle_comes_back_into_sync_when_it_registers_anew():
    village = Village(1)
    village.run(500)
    for _ in range(5):
        village.produce()
    village.run(500)
    village.fence(3)
    village.run(2_000)
    assert village.registration.isr == (1, 2)
    village.register(village.houses[3])
    village.run(3_000)
    assert set(village.registration.isr) == {1, 2, 3}


def test_a_follower_that_stops_fetching_leaves_the_isr_and_its_leader_goes_on():
    village = Village(1)
    village.run(500)
    village.cut_off.add(3)
    village.produce()
    village.run(500)
    assert not village.acked, "a replica in sync has not got it"
    village.run(4_000)
    assert village.registration.isr == (1, 2)
    assert len(village.acked) == 1


def test_a_leader_cut_off_acknowledges_nothing_and_its_records_go_when_it_follows():
    village = Village(1, min_insync_replicas="2")
    village.run(500)
    village.cut_off.add(1)
    old = village.houses[1].partition()
    village.produce()
    village.fence(1)
    village.run(1_000)
    assert village.registration.leader == 2
    assert old.is_leader, "it does not know better"
    assert not village.acked
    village.cut_off.clear()
    village.register(village.houses[1])
    village.run(3_000)
    assert old.log.log_end_offset == 0
    assert village.houses[1].replicas.table.find(TOPIC, 0).leader == 2


def grown(village: Village, records: int = 20) -> None:
    village.run(500)
    for _ in range(records):
        village.produce()
        village.run(20)
    village.run(500)
    assert len(village.acked) == records


def test_a_follower_on_a_full_disk_leaves_the_isr_and_comes_back_when_there_is_room():
    village = Village(2, min_insync_replicas="2")
    grown(village)
    village.houses[3].fs.fail("pwrite", errno.ENOSPC, times=1_000_000)
    village.produce()
    village.run(6_000)
    assert village.registration.isr == (1, 2), "long before the time that a slow follower has"
    assert len(village.acked) == 21
    village.houses[3].fs.heal()
    village.settle()


def test_a_leader_on_a_full_disk_lets_another_lead_and_follows_when_there_is_room():
    village = Village(3, min_insync_replicas="2")
    grown(village)
    village.houses[1].fs.fail("pwrite", errno.ENOSPC, times=1_000_000)
    village.produce()
    village.run(1_000)
    assert village.registration.leader == 2
    village.produce()
    village.run(
        6_000
    )  # until the old leader, in sync again with all that was there, has asked twice for what is new
    assert len(village.acked) == 21
    village.houses[1].fs.heal()
    village.settle()


def test_a_leader_whose_segment_is_damaged_resigns_and_fetches_it_anew():
    village = Village(4, min_insync_replicas="2")
    grown(village)
    village.kill(3)
    village.run(1_000)
    village.houses[3].fs = FaultyFileSystem()  # a new disk: it has to fetch everything
    leader = village.houses[1]
    leader.fs.flip(leader.partition().log.active.log_path, 200)
    village.revive(3)
    village.run(8_000)
    assert village.registration.leader == 2
    assert any(name.endswith(".corrupt") for name in leader.fs.listdir("t-0"))
    village.settle()


@pytest.mark.parametrize("side", ["leader", "follower"])
def test_a_throttled_replica_catches_up_at_its_rate_and_stays_in_sync_without(side):
    village = Village(5, **{f"{side}_replication_throttled_replicas": "0:3"})
    grown(village, 200)
    village.kill(3)
    village.run(1_000)
    village.houses[3].fs = FaultyFileSystem()
    size = village.houses[1].partition().log.size_bytes
    slow = SETTINGS._replace(**{f"{side}_rate": size // 10})
    for house in village.houses.values():
        house.settings = slow
        if house.alive:
            house.replicas.configure(slow)
    village.revive(3)
    village.run(4_000)
    got = village.houses[3].partition().log.size_bytes
    assert size // 10 <= got <= size // 10 * 6, "a burst of a second's worth, and four seconds more"
    village.run(12_000)
    assert set(village.registration.isr) == {1, 2, 3}
    for _ in range(100):
        village.produce()
        village.run(5)
    village.run(200)
    assert village.houses[3].partition().log.log_end_offset == 300, "in sync, it is not held back"


def test_all_disks_full_at_once_and_all_are_back_in_sync_when_there_is_room():
    village = Village(6, min_insync_replicas="2")
    grown(village)
    for house in village.houses.values():
        house.fs.fail("pwrite", errno.ENOSPC, times=1_000_000)
    for _ in range(20):
        village.produce()
        village.run(500)
    for house in village.houses.values():
        house.fs.heal()
    village.settle()
    village.produce()
    village.run(1_000)
    assert len(village.acked) >= 21


def test_a_leader_whose_segment_is_damaged_while_it_is_alone_in_sync_lets_others_join_and_then_lead():
    village = Village(7, min_insync_replicas="2")
    grown(village)
    for node_id in (2, 3):
        village.kill(node_id, at_once=True)
    village.run(1_000)
    assert village.registration.isr == (1,)
    leader = village.houses[1].partition()
    leader.note_damage(3)
    for node_id in (2, 3):
        village.revive(node_id)
    village.run(8_000)
    assert village.registration.leader in (2, 3)
    village.settle()


def test_a_damaged_segment_is_not_put_aside_while_the_leader_may_count_on_it():
    village = Village(8)
    grown(village)
    follower = village.houses[3]
    follower.partition().note_damage(0)
    village._change(isr=(1, 2))
    village.run(2_000)
    assert set(village.registration.isr) == {1, 2, 3}, "it had everything, and came back with it"
    assert not any(name.endswith(".corrupt") for name in follower.fs.listdir("t-0"))


def test_a_replica_whose_damage_cannot_be_put_aside_follows_when_it_can():
    village = Village(9)
    grown(village)
    damaged = village.houses[1]
    damaged.fs.fail("rename", errno.EIO, times=1_000_000)
    damaged.partition().note_damage(0)
    village.run(5_000)
    assert village.registration.leader != 1
    assert 1 not in village.registration.isr
    damaged.fs.heal()
    village.run(5_000)
    assert any(name.endswith(".corrupt") for name in damaged.fs.listdir("t-0"))
    village.settle()


def test_a_leader_that_has_no_room_for_a_log_lets_another_lead():
    village = Village(10)
    village.houses[1].fs.fail("makedirs", errno.ENOSPC, times=1_000_000)
    village.run(5_000)
    assert village.registration.leader == 2
    village.produce()
    village.run(1_000)
    assert len(village.acked) == 1
