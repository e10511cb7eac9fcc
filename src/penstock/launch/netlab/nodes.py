"""Who the processes of a job in emulated hosts are, as torchrun would tell them; pure."""

from penstock.launch.netlab.topology import Topology, address_of, nic_names

_PORT = 29_500  # any would do: a host's ports are its own


def environments(
    topology: Topology, *, processes_per_host: int, num_cores: int, together: bool = True
) -> list[tuple[int, dict[str, str]]]:
    """Return the host and the environment of each process.

    The hosts share the cores of one machine, so each process computes with its part of them, and with no GPU:
    two ranks of one would be refused by NCCL.

    Args:
        together: as ranks of one job; false: each process is a job of its own.

    >>> topology = Topology(num_hosts=2, num_nics=2)
    >>> host, names = environments(topology, processes_per_host=2, num_cores=8)[3]
    >>> host, names["RANK"], names["LOCAL_RANK"], names["MASTER_ADDR"], names["GLOO_SOCKET_IFNAME"]
    (1, '3', '1', '10.77.0.1', 'eth0,eth1')
    """
    world_size = topology.num_hosts * processes_per_host
    same = {
        "WORLD_SIZE": str(world_size if together else 1),
        "LOCAL_WORLD_SIZE": str(processes_per_host if together else 1),
        "MASTER_ADDR": address_of(0, 0),
        "MASTER_PORT": str(_PORT),
        "GLOO_SOCKET_IFNAME": ",".join(nic_names(topology)),
        "OMP_NUM_THREADS": str(max(1, num_cores // world_size)),
        "CUDA_VISIBLE_DEVICES": "",
    }
    return [
        (rank // processes_per_host, {**same, **_who(rank if together else 0, processes_per_host)})
        for rank in range(world_size)
    ]


def _who(rank: int, processes_per_host: int) -> dict[str, str]:
    host, local = divmod(rank, processes_per_host)
    return {"RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": str(host)}
