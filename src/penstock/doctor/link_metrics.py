"""Prometheus text of a report on several nodes: every link, and the nodes and cards to leave out."""

from collections.abc import Iterable, Iterator, Sequence

from penstock.doctor.link import LinkFault, LinkMeasurement
from penstock.doctor.outliers import Outlier
from penstock.obs.metric_names import LINKS

_Row = tuple[dict[str, str], float]


def metrics_text(
    links: Sequence[LinkMeasurement], outliers: Sequence[Outlier], hosts: dict[int, str], *, seconds: float
) -> str:
    """Return the metrics in Prometheus' text format, for a node exporter's folder of text files."""
    sound = [link for link in links if link.gbit_s]
    rows: dict[str, Iterable[_Row]] = {
        "penstock_link_bits_per_second": ((_labels(k, hosts), k.gbit_s * 1e9) for k in links),
        "penstock_link_round_trip_seconds": ((_labels(k, hosts), k.round_trip_s) for k in sound),
        "penstock_link_path_mtu_bytes": (
            (_labels(link, hosts), link.arriving_bytes) for link in links if link.arriving_bytes
        ),
        "penstock_link_lost_ratio": ((_labels(k, hosts), k.lost_share) for k in sound),
        "penstock_link_faulty": (
            (_labels(k, hosts), float(k.fault is not LinkFault.NONE or k.loses_packets)) for k in links
        ),
        "penstock_links_outlier": (
            ({"node": outlier.host or str(outlier.node), "card": outlier.card, "why": outlier.why}, 1.0)
            for outlier in outliers
        ),
        "penstock_links_check_seconds": [({}, seconds)],
    }
    return "".join(f"{line}\n" for name, each in rows.items() for line in _lines(name, each))


def _lines(name: str, rows: Iterable[_Row]) -> Iterator[str]:
    yield f"# HELP {name} {LINKS[name][1]}"
    yield f"# TYPE {name} gauge"
    for labels, value in rows:
        inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        yield f"{name}{{{inside}}} {value:.9g}" if inside else f"{name} {value:.9g}"


def _labels(link: LinkMeasurement, hosts: dict[int, str]) -> dict[str, str]:
    return {
        "source": hosts.get(link.source, str(link.source)),
        "source_card": link.source_nic,
        "target": hosts.get(link.target, str(link.target)),
        "target_card": link.target_nic,
    }


def _escaped(text: str) -> str:
    r"""Return a label's value as the format wants it.

    >>> print(_escaped('a "b"'))
    a \"b\"
    """
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
