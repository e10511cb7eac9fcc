"""Write a benchmark's runs for TensorBoard, by its own writer, and give those to Trackio, by its own import.

    python console_peers.py tensorboard DATA EVENTS
    python console_peers.py trackio EVENTS PROJECT         # TRACKIO_DIR says where its databases go
    python console_peers.py grow-tensorboard DATA/RUN.csv EVENTS/RUN POINTS BETWEEN_S
    python console_peers.py grow-trackio DATA/RUN.csv PROJECT POINTS BETWEEN_S

DATA holds one CSV file per run, with a column `step` and one column per metric. A run grows from its last
step on, a point every BETWEEN_S seconds: `written STEP UNIX_MS` is printed once a reader could have it. A
process of the peers' own environment: tensorboard, trackio, tbparse.
"""

import csv
import sys
import time
from pathlib import Path


def rows(path):
    """Yield step and metrics of each row of a CSV file."""
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            step = int(row.pop("step"))
            yield step, {name: float(value) for name, value in row.items() if value}


def event_writer(folder):
    """Return TensorBoard's writer of event files."""
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    return EventFileWriter(str(folder))


def event(step, metrics):
    """Return the event of a step."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
    return Event(wall_time=1.8e9 + step, step=step, summary=Summary(value=values))


def write_events(path, folder):
    """Write a run's scalars as an event file."""
    writer = event_writer(folder)
    for step, metrics in rows(path):
        writer.add_event(event(step, metrics))
    writer.close()


def write_all(peer, data, target):
    """Write all runs; print the seconds it took."""
    begin = time.perf_counter()
    if peer == "tensorboard":
        for path in sorted(Path(data).glob("*.csv")):
            write_events(path, Path(target) / path.stem)
    else:
        import trackio

        trackio.import_tf_events(data, project=target)
    print(f"seconds {time.perf_counter() - begin:.1f}")


def events_of(folder):
    """Return what adds a point to a run of event files, and returns once it is flushed."""
    writer = event_writer(folder)

    def add(step, metrics):
        writer.add_event(event(step, metrics))
        writer.flush()

    return add


def trackio_run(project, name):
    """Return what adds a point to a run of Trackio, and returns once it is in the database."""
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    run = trackio.init(project, name, resume="must", auto_log_gpu=False, auto_log_cpu=False)

    def add(step, metrics):
        trackio.log(metrics, step=step)
        while SQLiteStorage.get_max_step_for_run(project, name, run.id) < step:  # its thread gathers 0.5 s
            time.sleep(0.01)

    return add


def grow(add, path, points, between_s):
    """Add points to a run, from its last row on."""
    *_, (last, metrics) = rows(path)
    for step in range(last + 1, last + 1 + points):
        add(step, metrics)
        print(f"written {step} {1000 * time.time():.1f}", flush=True)
        if step < last + points:
            time.sleep(between_s)


def run_command(what, data, target, *more):
    """Do what the command line says."""
    if not more:
        write_all(what, data, target)
        return
    path, (points, between_s) = Path(data), more
    add = events_of(target) if what == "grow-tensorboard" else trackio_run(target, path.stem)
    grow(add, path, int(points), float(between_s))


if __name__ == "__main__":
    run_command(*sys.argv[1:])
