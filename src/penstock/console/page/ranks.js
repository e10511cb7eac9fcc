// Ranks by steps as a heat map on a canvas: one pixel or more for each cell, the worst of those that share one.

import * as api from "./api.js";
import { el, failure, table, throttled } from "./dom.js";
import { seconds, ago } from "./table.js";
import { remember } from "./take.js";
import { count, written } from "../charts/charts.js";

const UNITS = { step_s: "s", own_s: "s", data_wait_s: "s", blocked_s: "s", memory_bytes: "bytes", bytes: "bytes", sent_bytes: "bytes" };
const TITLES = { own_s: "own step time", step_s: "step time", data_wait_s: "data wait", blocked_s: "blocked time", memory_bytes: "memory", sent_bytes: "bytes sent" };
const titled = (metric) => TITLES[metric] ?? metric.replaceAll("_", " ");
const LEFT = 46, BOTTOM = 26, CELL_PX = 18, LEAST_HEIGHT = 120, MOST_HEIGHT = 560, MOST_SLOW = 8, LOOK_MS = 3000;
/** Viridis (van der Walt and Smith, 2015) at nine places: even to the eye, and in grey. */
const SCALE = [[68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141], [39, 173, 129], [92, 200, 99], [170, 220, 50], [253, 231, 37]];

function colorAt(share) {
  const at = Math.min(Math.max(share, 0), 1) * (SCALE.length - 1), low = Math.floor(at), part = at - low;
  const [a, b] = [SCALE[low], SCALE[Math.min(low + 1, SCALE.length - 1)]];
  return a.map((value, i) => value + part * (b[i] - value));
}

const TABLE = Uint32Array.from({ length: 256 }, (_, i) => {
  const [red, green, blue] = colorAt(i / 255);
  return (255 << 24) | (blue << 16) | (green << 8) | red;
});

/** Return float32 values of base64 text. */
export function decoded(text) {
  const bytes = Uint8Array.fromBase64?.(text) ?? ofLetters(atob(text));
  return new Float32Array(bytes.buffer, 0, bytes.byteLength >> 2);
}

function ofLetters(letters) {
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = letters.charCodeAt(i);  // a tenth of the time of Uint8Array.from
  return bytes;
}

/** Return [values of width x height pixels, low, high]: each pixel is the largest of its cells. */
export function pooled(values, ranks, steps, width, height) {
  const found = new Float32Array(width * height).fill(NaN);
  for (let y = 0; y < height; y++) {
    const r0 = Math.floor((y * ranks) / height), r1 = Math.max(Math.ceil(((y + 1) * ranks) / height), r0 + 1);
    for (let x = 0; x < width; x++) {
      const s0 = Math.floor((x * steps) / width), s1 = Math.max(Math.ceil(((x + 1) * steps) / width), s0 + 1);
      let most = NaN;
      for (let r = r0; r < r1; r++) for (let s = s0, at = r * steps + s0; s < s1; s++, at++) if (!(values[at] <= most) && values[at] === values[at]) most = values[at];
      found[y * width + x] = most;
    }
  }
  return found;
}

/** Return the values between which colours change: of a sample, the 1st and the 99th percentile. */
export function limits(values) {
  const stride = Math.max(1, Math.floor(values.length / 20_000)), known = [];
  for (let i = 0; i < values.length; i += stride) if (values[i] === values[i]) known.push(values[i]);
  if (!known.length) return [0, 1];
  const sample = Float32Array.from(known).sort();
  const [low, high] = [sample[Math.floor(sample.length * 0.01)], sample[Math.floor((sample.length - 1) * 0.99)]];
  return high > low ? [low, high] : [low - 0.5 * Math.abs(low || 1), low + 0.5 * Math.abs(low || 1)];
}

const placeOf = (start, r) => ({ host: start?.hosts[r] ?? "", device: start?.devices[r] ?? "", nic: start?.nics[r] ?? "" });

export class RanksView {
  constructor(body, page, query) {
    Object.assign(this, { body, page, turn: 0, metric: query.get("metric") || null, hangs: el("section", { class: "view" }), traces: el("section", { class: "view" }) });
    this.look = throttled(LOOK_MS, () => this.#look());
    this.load();
    this.#readFiles();
  }

  async load({ isLive = false } = {}) {
    const mine = ++this.turn, points = Math.max(Math.ceil((this.body.clientWidth - LEFT) * devicePixelRatio), 0) || null;
    this.isLoading = true;
    this.isOutdated = false;
    try {
      const found = await api.ranks(this.page.id, this.metric, { points });
      if (mine === this.turn) this.#take(found);
    } catch (error) {
      if (mine !== this.turn || isLive) return;  // what was drawn stays
      this.canvas = null;
      this.body.replaceChildren(failure(error), this.hangs, this.traces);
    } finally {
      if (mine === this.turn) {
        this.isLoading = false;
        if (this.isOutdated) this.look();
      }
    }
  }

  // A table of many ranks has some megabytes: it is asked for if there are new records in it. One that is on its
  // way is waited for: over a slow link the next look comes sooner than the table.
  async #look() {
    if (this.isClosed || document.hidden) return;
    if (this.isLoading) {
      this.isOutdated = true;
      return;
    }
    const last = this.canvas ? this.found.steps.at(-1) + 1 : null, mine = this.turn;
    const news = await api.ranks(this.page.id, this.metric, { points: 1, from: last }).catch(() => null);
    if (news?.records && mine === this.turn) this.load({ isLive: true });
  }

  points() {
    this.look();
  }

  eventsRead() {
    this.#readFiles();
  }

  again() {
    this.load({ isLive: true });
    this.#readFiles();
  }

  #take(found) {
    const { num_ranks: ranks, steps } = found, kept = this.at && [this.at[0], this.found.steps[this.at[1]]];
    Object.assign(this, { found, metric: found.metric, at: null, picture: null });
    if (!ranks || !steps.length) {
      this.canvas = null;
      this.body.replaceChildren(el("p", { class: "empty" }, "No record of single ranks yet. A run of several ranks writes one every few steps."), this.hangs, this.traces);
      return;
    }
    this.values = decoded(found.values);
    found.values = "";  // some megabytes of text
    if (!this.canvas) this.#build();
    this.extent.textContent = this.#extent();
    this.slowest.replaceChildren(this.#slowest());
    this.slow.replaceChildren(this.#slow());
    if (!kept) return this.#draw();
    const s = steps.findIndex((step) => step >= kept[1]);
    if (s >= 0 && kept[0] < ranks) this.#show(kept[0], s);
    else this.#draw();
  }

  #build() {
    const choice = el("select", { "aria-label": "Metric", on: { change: () => this.#choose(choice.value) } }, this.found.metrics.map((name) => el("option", { value: name, selected: name === this.metric }, titled(name))));
    this.ends = [el("span"), el("span")];
    this.canvas = el("canvas", { tabindex: "0", role: "img" });
    this.status = el("p", { role: "status", class: "readout" }, "Point at a cell, or move with the arrow keys; Enter or a click keeps it.");
    this.details = el("div", { class: "details" });
    this.extent = el("span", { class: "quiet" });
    this.slowest = el("section");
    this.slow = el("section");
    this.scale = el("canvas", { class: "scale", width: 256, height: 1, "aria-hidden": "true" });
    const scale = this.scale.getContext("2d"), strip = scale.createImageData(256, 1);
    new Uint32Array(strip.data.buffer).set(TABLE);
    scale.putImageData(strip, 0, 0);
    this.body.replaceChildren(
      el("section", { class: "card ranks", "aria-label": "Heat map" },
        el("div", { class: "toolbar" }, choice, el("span", { class: "scale-of" }, this.ends[0], this.scale, this.ends[1]), this.extent),
        this.canvas, this.status, this.details),
      this.slowest, this.slow, this.hangs, this.traces);
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerdown", (event) => { this.#point(event); this.#keep(); });
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    this.sized?.disconnect();
    this.sized = new ResizeObserver(() => {
      if (this.canvas && this.canvas.clientWidth !== this.drawn) this.#draw();  // its height is of our own making
    });
    this.sized.observe(this.canvas);
  }

  #choose(metric) {
    this.metric = metric;
    remember(`/run/${encodeURIComponent(this.page.id)}/ranks`, { metric });
    this.load();
  }

  #extent() {
    const { num_ranks: ranks, steps, records = steps.length } = this.found, size = `${count(ranks)} ranks \u00d7 ${count(records)} records`;
    return records > steps.length ? `${size}; a column is the largest of ${count(Math.ceil(records / steps.length))}` : size;
  }

  get #unit() {
    return UNITS[this.metric] ?? (this.metric?.endsWith("_share") ? "share" : "");
  }

  /** Make the picture of all cells for the size of the canvas, unless it is there. */
  #picture(across, down) {
    if (this.picture?.width === across && this.picture.height === down) return;
    const { num_ranks: ranks, steps } = this.found, cells = pooled(this.values, ranks, steps.length, across, down);
    [this.low, this.high] = limits(cells);
    this.ends.forEach((end, i) => end.replaceChildren(written(i ? this.high : this.low, this.#unit)));
    this.canvas.setAttribute("aria-label", this.#description());
    const picture = new ImageData(across, down), pixels = new Uint32Array(picture.data.buffer), span = 255 / (this.high - this.low);
    for (let i = 0; i < cells.length; i++) if (cells[i] === cells[i]) pixels[i] = TABLE[Math.min(Math.max(Math.round((cells[i] - this.low) * span), 0), 255)];
    this.picture = new OffscreenCanvas(across, down);
    this.picture.getContext("2d").putImageData(picture, 0, 0);
  }

  #draw() {
    const { num_ranks: ranks, steps } = this.found, width = this.canvas.clientWidth, ratio = devicePixelRatio;
    if (!width) return;
    this.drawn = width;
    const height = Math.min(Math.max(ranks * CELL_PX, LEAST_HEIGHT), MOST_HEIGHT);
    this.canvas.style.height = height + BOTTOM + "px";
    this.canvas.width = width * ratio;
    this.canvas.height = (height + BOTTOM) * ratio;
    this.#picture(Math.min(steps.length, Math.max(Math.floor((width - LEFT) * ratio), 1)), Math.min(ranks, Math.floor(height * ratio)));
    const context = this.canvas.getContext("2d"), style = getComputedStyle(this.canvas);
    context.scale(ratio, ratio);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.picture, LEFT, 0, width - LEFT, height);
    this.size = { width: width - LEFT, height };
    context.fillStyle = style.getPropertyValue("--muted");
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "right";
    const each = Math.max(1, Math.ceil(ranks / Math.floor(height / 20)));
    for (let r = 0; r < ranks; r += each) context.fillText(String(r), LEFT - 8, Math.max(((r + 0.5) * height) / ranks, 7));
    context.textAlign = "center";
    const ticks = Math.max(2, Math.min(8, Math.floor(width / 110), steps.length));
    for (let i = 0; i < ticks; i++) {
      const s = ticks > 1 ? Math.round((i * (steps.length - 1)) / (ticks - 1)) : 0, x = LEFT + ((s + 0.5) * (width - LEFT)) / steps.length;
      context.textAlign = i === 0 ? "left" : i === ticks - 1 ? "right" : "center";
      context.fillText(count(steps[s]), i === 0 ? LEFT : i === ticks - 1 ? width : x, height + 15);
    }
    if (this.at) this.#outline(context);
  }

  #outline(context) {
    const { num_ranks: ranks, steps } = this.found, [r, s] = this.at, { width, height } = this.size;
    context.lineWidth = 2;
    context.strokeStyle = getComputedStyle(this.canvas).getPropertyValue("--ink");
    context.strokeRect(LEFT + (s * width) / steps.length - 1, (r * height) / ranks - 1, Math.max(width / steps.length, 2) + 2, Math.max(height / ranks, 2) + 2);
  }

  /** Return where a rank ran at a column: of a run that was started again, each start has its own hosts. */
  #place(r, s) {
    return placeOf(this.found.starts.findLast(({ column }) => column <= s), r);
  }

  /** Return all hosts or devices that a rank had in the shown steps. */
  #everywhere(r, what) {
    const found = new Set(this.found.starts.map((start) => placeOf(start, r)[what]).filter(Boolean));
    return [...found].join(", ") || "\u2013";
  }

  #point(event) {
    const { num_ranks: ranks, steps } = this.found, x = event.offsetX - LEFT, y = event.offsetY;
    if (x < 0 || x >= this.size.width || y < 0 || y >= this.size.height) return;
    this.#show(Math.floor((y * ranks) / this.size.height), Math.floor((x * steps.length) / this.size.width));
  }

  #show(r, s) {
    const { steps } = this.found, { host } = this.#place(r, s), value = this.values[r * steps.length + s];
    this.at = [r, s];
    const said = `rank ${r}${host ? ` on ${host}` : ""}, step ${count(steps[s])}: ${Number.isNaN(value) ? "no record" : written(value, this.#unit)}`;
    if (this.status.textContent !== said) this.status.textContent = said;  // a screen reader says it once
    this.#draw();
  }

  #keep() {
    if (!this.at) return;
    const place = { rank: this.at[0], ...this.#place(...this.at) };
    const rows = Object.entries(place).filter(([, value]) => value !== "");
    this.details.replaceChildren(el("dl", { class: "figures" }, rows.map(([name, value]) => el("div", { class: "figure" }, el("dt", {}, name), el("dd", {}, String(value))))));
  }

  #key(event) {
    const { num_ranks: ranks, steps } = this.found, [r, s] = this.at || [0, 0];
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (move) this.#show(Math.min(Math.max(r + move[0], 0), ranks - 1), Math.min(Math.max(s + move[1], 0), steps.length - 1));
    else if (event.key === "Enter" || event.key === " ") this.#keep();
    else return;
    event.preventDefault();
  }

  // Ranks by their mean against the median rank's: what a reader looks for in the picture, as a table.
  #slowest() {
    const means = this.found.means.map((mean, rank) => ({ rank, mean })).filter(({ mean }) => mean !== null).sort((a, b) => b.mean - a.mean);
    if (!means.length) return "";
    const median = means[means.length >> 1].mean;
    return part(`Highest ${titled(this.metric)}`, table("Highest ranks", ["rank", "host", "device", "mean", "times the median"], means.slice(0, 8).map(({ rank, mean }) => [
      String(rank), this.#everywhere(rank, "host"), this.#everywhere(rank, "device"), written(mean, this.#unit), median ? (mean / median).toFixed(2) : "\u2013"]), { className: "wordy" }));
  }

  // What `penstock report` has too: ranks that the others waited for, from comparisons every few steps.
  #slow() {
    const found = new Map();
    for (const { step, rank, own_s: own, median_s: median } of this.found.slow) {
      const { times, ratio } = found.get(rank) ?? { times: 0, ratio: 0 };
      found.set(rank, { times: times + 1, ratio: Math.max(ratio, own / median), step });
    }
    if (!found.size) return "";
    const rows = [...found].sort(([, a], [, b]) => b.ratio - a.ratio).slice(0, MOST_SLOW);
    return part("Ranks the others waited for", table("Ranks the others waited for", ["rank", "comparisons", "times the median at most", "last at step"],
      rows.map(([rank, { times, ratio, step }]) => [String(rank), count(times), ratio.toFixed(2), count(step)])));
  }

  async #readFiles() {
    const [hangs, traces] = await Promise.all([api.hangs, api.traces].map((read) => read(this.page.id).catch(() => null)));
    if (this.isClosed) return;
    const read = JSON.stringify([hangs, traces]);
    if (read === this.read) return;  // what a reader has opened stays open
    this.read = read;
    if (hangs) this.#drawHangs(hangs);
    if (traces) this.#drawTraces(traces);
  }

  #drawHangs({ hangs, unread, num_unread: others, num_beyond: beyond }) {
    if (!hangs.length && !others) return this.hangs.replaceChildren();
    this.hangs.replaceChildren(el("h2", {}, "Hangs"), ...[...hangs].reverse().map(hangOf),
      others ? el("p", { class: "notice" }, `${unread.join(", ")}${others > unread.length ? " and others" : ""}: damaged, too large or of another version: not in the diagnosis.`) : "",
      beyond ? el("p", { class: "notice" }, `Not read, because the files are too many: ${count(beyond)} that are older. The diagnosis is of the others.`) : "");
  }

  #drawTraces({ traces, num_traces: all }) {
    if (!all) return this.traces.replaceChildren();
    const rows = traces.map(({ name, bytes, time }) => [el("a", { href: api.traceAddress(this.page.id, name), download: name }, name), written(bytes, "bytes"), ago(time)]);
    this.traces.replaceChildren(el("h2", {}, "Traces"), el("p", { class: "quiet" }, "Profiled steps (measure.trace_steps): ui.perfetto.dev opens .json.gz, pytorch.org/memory_viz opens .pickle.", all > traces.length ? ` The newest ${traces.length} of ${count(all)}.` : ""),
      table("Traces", ["file", "size", "written"], rows));
  }

  #description() {
    const { num_ranks: ranks, steps } = this.found;
    return `Heat map of ${titled(this.metric)}: ${ranks} ranks down, ${steps.length} steps across, colours from ${written(this.low, this.#unit)} to ${written(this.high, this.#unit)}. Arrow keys move a cell; the table below has the highest ranks.`;
  }

  close() {
    this.turn = -1;
    this.isClosed = true;
    this.sized?.disconnect();
  }
}

function part(title, ...content) {
  const found = document.createDocumentFragment();
  found.append(el("h2", {}, title), ...content);
  return found;
}

function hangOf({ time, text, ranks, num_ranks: all }) {
  const calls = ({ rank, host, step, doing, stacks }) => [el("h3", {}, `rank ${rank} on ${host}, step ${count(step)} (${doing})`),
    ...Object.entries(stacks).map(([thread, stack]) => el("pre", { tabindex: "0", role: "region", "aria-label": `${thread} of rank ${rank}` }, `${thread}\n  ${stack.join("\n  ")}`))];
  return el("article", { class: "card" }, el("p", { class: "quiet" }, ago(seconds(time))), el("p", {}, text),
    el("details", {}, el("summary", {}, ranks.length < all ? `Calls of ${ranks.length} of ${count(all)} ranks` : "Calls of each rank"), el("div", { class: "view" }, ranks.flatMap(calls))));
}
