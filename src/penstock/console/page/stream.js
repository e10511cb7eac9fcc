// One stream of server-sent events for all windows of a browser.
//
// A browser opens six connections to a host, and a stream holds one. So windows do not open their own: a
// SharedWorker (stream_worker.js) runs this file once for all of them, or the page itself where there is none
// (Chrome on Android). The table of all runs has a stream of its own, so that it is not read again whenever a
// window of a run comes or goes.
//
// A window sends { ids, since } to follow runs from its cursors on (no ids: the table of all runs), and null to end.
// It is sent { isOn } of the connection ({ isRefused }: the answer was no stream), and { kind, data } of each event;
// the kind `at` has the cursor up to which it was sent a run.

const RETRY_MS = 3000, KINDS = ["points", "row", "gone", "event", "samples", "reset"];

class Stream {
  #windows = new Map();  // port -> { ids, since, isServed }; what is sent before its own connection begins is not for it
  #source = null;
  #timer = 0;

  add(port, { ids, since }) {
    this.#windows.set(port, { ids, since, isServed: !ids.length });
    // Rows that changed before it came were sent to the others only. A stream of runs goes on from its cursors.
    if (!ids.length && this.#source?.readyState === EventSource.OPEN) {
      port.postMessage({ isOn: true });
      port.postMessage({ kind: "reset", data: {} });
    } else if (ids.length || !this.#source) this.#beginIn(0);
  }

  remove(port) {
    const asked = this.#windows.get(port);
    if (this.#windows.delete(port) && (asked.ids.length || !this.#windows.size)) this.#beginIn(0);
  }

  // Windows that come and go together, as when a window turns to another view, make one new connection.
  #beginIn(milliseconds) {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#begin(), milliseconds);
  }

  #begin() {
    this.#source?.close();
    this.#source = null;
    if (!this.#windows.size) return;
    for (const window of this.#windows.values()) window.isServed = true;
    const pairs = [...this.#windows.values()].flatMap(({ ids, since }) => ids.map((id, i) => `${id},${since[i] ?? ""}`));
    const asked = [...new Set(pairs)].map((pair) => pair.split(","));
    const query = new URLSearchParams(asked.length ? { runs: asked.map(([id]) => id), since: asked.map(([, cursor]) => cursor) } : {});
    const source = this.#source = new EventSource(new URL(`../api/stream?${query}`, import.meta.url));
    source.addEventListener("open", () => this.#tell({ isOn: true }));
    // It is made again from where it is now. The browser would begin where it began, and not at all after an
    // answer that is no stream (401: the console was started again and knows no session).
    source.addEventListener("error", () => {
      this.#tell({ isOn: false, isRefused: source.readyState === EventSource.CLOSED });
      source.close();
      this.#beginIn(RETRY_MS);
    });
    for (const kind of KINDS) source.addEventListener(kind, (event) => this.#tell({ kind, data: JSON.parse(event.data) }));
    source.addEventListener("at", (event) => this.#move(JSON.parse(event.data)));
  }

  #tell(message) {
    const run = message.data?.run ?? message.data?.id;
    for (const [port, { ids, isServed }] of this.#windows) if (isServed && (!ids.length || !run || ids.includes(run))) port.postMessage(message);
  }

  // The window hears it too: hidden, it leaves, and comes again from there.
  #move({ run, cursor }) {
    for (const [port, { ids, since, isServed }] of this.#windows) {
      if (!isServed || !ids.includes(run)) continue;
      since[ids.indexOf(run)] = cursor;
      port.postMessage({ kind: "at", data: { run, cursor } });
    }
  }
}

const ofTable = new Stream(), ofRuns = new Stream();

/** Serve the window at the other end of a port. */
export function join(port) {
  const leave = () => {
    ofTable.remove(port);
    ofRuns.remove(port);
  };
  port.addEventListener("message", ({ data: asked }) => {
    leave();
    if (asked) (asked.ids.length ? ofRuns : ofTable).add(port, asked);
  });
  port.addEventListener("close", leave);  // of a window that crashed
  port.start();
}
