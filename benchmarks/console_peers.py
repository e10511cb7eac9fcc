"""Write a benchmark's runs for TensorBoard, by its own writer, and give those to Trackio, by its own import.

    python console_peers.py tensorboard DATA EVENTS
    python console_peers.py trackio EVENTS PROJECT         # TRACKIO_DIR says where its databases go

DATA holds one CSV file per run, with a column `step` and one column per metric. A process of the peers' own
environment: tensorboard, trackio, tbparse.
"""

import csv
import sys
import time
from pathlib import Path


def write_events(path, folder):
    """Write a run's scalars as an event file."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            step = int(row.pop("step"))
            values = [
                Summary.Value(tag=name, simple_value=float(value)) for name, value in row.items() if value
            ]
            writer.add_event(Event(wall_time=1.8e9 + step, step=step, summary=Summary(value=values)))
    writer.close()


def write_all():
    """Write all runs; print the seconds it took."""
    peer, data, target = sys.argv[1:]
    begin = time.perf_counter()
    if peer == "tensorboard":
        for path in sorted(Path(data).glob("*.csv")):
            write_events(path, Path(target) / path.stem)
    else:
        import trackio

        trackio.import_tf_events(data, project=target)
    print(f"seconds {time.perf_counter() - begin:.1f}")


if __name__ == "__main__":
    write_all()
