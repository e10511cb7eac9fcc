// The server's answers: JSON by route, and one stream of events.

import { known } from "../charts/charts.js";
import { el } from "../charts/dom.js";
import { join } from "./stream.js";

export const isLive = true;
/** Metrics of one request. */
const MOST_ASKED = 200;
/** Before a request to a job is sent, the run's data may be opened; what gave up waiting would be sent again. */
const PATIENCE_MS = 60_000, REQUEST_PATIENCE_MS = 900_000, MODEL_PATIENCE_MS = 900_000;

export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function asked(path, options = {}) {
  const response = await fetch("api/" + path, { signal: AbortSignal.timeout(PATIENCE_MS), ...options }).catch((error) => {
    throw new Refused(`The console does not answer (${error.message}). Is \`penstock console\` still running?`, 0);
  });
  const text = await response.text();
  let body = null;
  try {
    body = JSON.parse(text);
  } catch {
    // Said below: an answer that is no JSON is an error's plain text.
  }
  if (!response.ok || body === null) {
    const said = body?.error?.message ?? body?.error ?? body?.detail ?? body?.message;
    throw new Refused(typeof said === "string" ? said : `The console answered with status ${response.status}.`, response.status);
  }
  return body;
}

const of = (id, rest = "") => "runs/" + encodeURIComponent(id) + rest;
const query = (values) => {
  const given = Object.entries(values).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return given.length ? "?" + new URLSearchParams(given) : "";
};
/** Return names with commas between, as core/toml.py reads them: a name with a comma is in quotes. */
const listed = (names) => names.map((name) => (/^["']|,/.test(name) ? JSON.stringify(name).replaceAll("\x7f", "\\u007f") : name)).join(",");
const posted = (value) => ({ method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(value) });
const sent = (path, value, options = {}) => asked(path, { ...posted(value), ...options });

export const runs = (search = "") => asked("runs" + query({ search })).then((found) => found.runs);
export const run = (id) => asked(of(id));

/** Return metric -> { x, y, means } of charts, whose metrics are [[name]]. */
export async function curves(id, charts, x, { from = null, to = null, points = 1000 } = {}) {
  const found = await Promise.all(batched(charts).map((names) => asked(of(id, "/curves" + query({ metrics: listed(names), x, from, to, points })))));
  return new Map(found.flatMap((one) => Object.keys(one.series).map((name) => [name, known(one.x, one.series[name], one.means[name])])));
}

/** Return the metrics of charts in lists of at most MOST_ASKED; those of a chart are together, as a stack needs one x. */
function batched(charts) {
  const found = [[]], seen = new Set();
  for (const names of charts) {
    const own = names.filter((name) => !seen.has(name));
    for (let i = 0; i < own.length; i += MOST_ASKED) {
      const part = own.slice(i, i + MOST_ASKED);
      if (found.at(-1).length + part.length > MOST_ASKED) found.push([]);
      found.at(-1).push(...part);
    }
    for (const name of own) seen.add(name);
  }
  return found;
}

export const values = (id, metrics, x, at) => asked(of(id, "/values" + query({ metrics: listed(metrics), x, at }))).then((found) => found.values);
export const compare = (id, other) => asked(of(id, "/compare" + query({ with: other })));
export const requests = (id) => asked(of(id, "/requests"));
export const request = (id, value) => sent(of(id, "/requests"), value, { signal: AbortSignal.timeout(REQUEST_PATIENCE_MS) });
export const mixture = (id) => asked(of(id, "/mixture"));
export const preview = (id, weights) => sent(of(id, "/mixture"), { weights });
export const ranks = (id, metric, { points = null, from = null } = {}) => asked(of(id, "/ranks" + query({ metric, points, from })));
export const hangs = (id) => asked(of(id, "/hangs"));
export const traces = (id) => asked(of(id, "/traces"));
export const traceAddress = (id, name) => "api/" + of(id, "/traces/" + encodeURIComponent(name));
export const rows = (id, step, { offset = 0, limit = 4 } = {}) => asked(of(id, "/rows/" + encodeURIComponent(step) + query({ offset, limit })));
export const losses = (id, step, value) => sent(of(id, `/rows/${encodeURIComponent(step)}/losses`), value, { signal: AbortSignal.timeout(MODEL_PATIENCE_MS) });
export const answers = (id) => asked(of(id, "/answers"));
export const checkpoints = (id) => asked(of(id, "/checkpoints"));
export const modelAddress = (id, step, mode) => "api/" + of(id, `/checkpoints/${encodeURIComponent(step)}/${mode === "chat" ? "chat/" : ""}completions`);
export const answersOf = (id, value, handlers, signal) => streamed(of(id, "/answers"), value, handlers, signal);

/** Post, and read the answer's server-sent events: handlers by kind get their data; an event `error` is thrown. */
async function streamed(path, value, handlers, signal) {
  const response = await fetch("api/" + path, { ...posted(value), signal });
  if (!response.ok) {
    const body = await response.json().catch(() => null), said = body?.error ?? body?.detail;
    throw new Refused(typeof said === "string" ? said : `The console answered with status ${response.status}.`, response.status);
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const events = (text + part.value).split("\n\n");
    text = events.pop();
    for (const event of events) {
      const [, kind, data] = /^event: (\w+)\ndata: (.*)$/.exec(event) ?? [];
      if (kind === "error") throw new Refused(JSON.parse(data).said, 0);
      if (kind === "end") return;
      handlers[kind]?.(JSON.parse(data));
    }
  }
  throw new Refused("The answer is incomplete because the console ended.", 0);
}

/**
 * Follow runs over the stream of all windows (stream.js); all runs if none are given.
 *
 * A page that is not in sight lets go of it. When it is shown again, it goes on from what it has.
 *
 * Args: handlers: points, row, gone, event, samples, reset, at (functions of the event's data; at: { run, cursor } of what was sent);
 * since(): cursors of what the page has of the runs. Returns a function that ends it.
 */
export function follow(ids, handlers, since = () => []) {
  const live = document.querySelector("#live");
  let port = null;
  const say = (state, text = { on: "live", off: "reconnecting", wait: "connecting" }[state] ?? "") => {
    live.className = state;
    live.replaceChildren(text);
  };
  const refused = async (mine) => {
    const isKnown = await asked("runs").then(() => true, ({ status }) => status !== 401);
    if (mine !== port || live.className === "on") return;
    if (isKnown) say("off");
    else if (!live.firstElementChild) say("off", el("button", { type: "button", class: "plain", on: { click: () => location.reload() } }, "sign in again"));
  };
  const begin = () => {
    const mine = port = streamPort(() => {
      if (mine === port) begin();
    });
    mine.addEventListener("message", ({ data: { isOn, isRefused, kind, data } }) => {
      if (mine !== port) return;
      if (kind) handlers[kind]?.(data);
      else if (isRefused) refused(mine);
      else say(isOn ? "on" : "off");
    });
    mine.start();
    mine.postMessage({ ids, since: since() });
  };
  const end = () => {
    port?.postMessage(null);
    port?.close();
    port = null;
    say("");
  };
  const turned = () => {
    if (!document.hidden && !port) {
      say("wait");
      begin();
    } else if (document.hidden && port) end();
  };
  // A page that is left says so: of a port whose page is gone, Chrome alone tells the worker. One that comes
  // back from the browser's cache of pages follows again.
  const left = () => port && end();
  document.addEventListener("visibilitychange", turned);
  addEventListener("pagehide", left);
  addEventListener("pageshow", turned);
  turned();
  return () => {
    document.removeEventListener("visibilitychange", turned);
    removeEventListener("pagehide", left);
    removeEventListener("pageshow", turned);
    end();
  };
}

let isShared = "SharedWorker" in globalThis;

/** Return a port to what holds the stream. failed(): the worker does not start, and another port is this page's own. */
function streamPort(failed) {
  if (isShared) {
    const worker = new SharedWorker(new URL("stream_worker.js", import.meta.url), { type: "module" });
    worker.addEventListener("error", () => {
      isShared = false;
      failed();
    });
    return worker.port;
  }
  const { port1, port2 } = new MessageChannel();
  join(port2);
  return port1;
}
