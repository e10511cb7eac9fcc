"""Who the processes of a job in emulated hosts are, as torchrun would tell them; pure."""

from penstock.launch.netlab.topology import Topology, address_of, nic_names

_PORT = 29_500  # any would do: a host's ports are its own


def environments(
    topology: Topology, *, processes_per_host: int, num_cores: int
) -> list[tuple[int, dict[str, str]]]:
    """Return the host and the environment of each rank.

    The hosts share the cores of one machine, so each rank computes with its part of them.

    >>> topology = Topology(num_hosts=2, num_nics=2)
    >>> host, names = environments(topology, processes_per_host=2, num_cores=8)[3]
    >>> host, names["RANK"], names["LOCAL_RANK"], names["MASTER_ADDR"], names["GLOO_SOCKET_IFNAME"]
    (1, '3', '1', '10.77.0.1', 'eth0,eth1')
    """
    world_size = topology.num_hosts * processes_per_host
    same = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(processes_per_host),
        "MASTER_ADDR": address_of(0, 0),
        "MASTER_PORT": str(_PORT),
        "GLOO_SOCKET_IFNAME": ",".join(nic_names(topology)),
        "OMP_NUM_THREADS": str(max(1, num_cores // world_size)),
    }
    return [
        (
            rank // processes_per_host,
            {
                **same,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % processes_per_host),
                "GROUP_RANK": str(rank // processes_per_host),
            },
        )
        for rank in range(world_size)
    ]
