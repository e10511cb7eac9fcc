// Ranks by steps as a heat map on a canvas: one pixel or more for each cell, the worst of those that share one.
// The console shows it with what it asks for, a report with what is embedded in it.

import { el, table } from "./dom.js";
import { count, written } from "./charts.js";

const UNITS = { step_s: "s", own_s: "s", data_wait_s: "s", blocked_s: "s", memory_bytes: "bytes", bytes: "bytes", sent_bytes: "bytes" };
const TITLES = { own_s: "own step time", step_s: "step time", data_wait_s: "data wait", blocked_s: "blocked time", memory_bytes: "memory", sent_bytes: "bytes sent" };
const titled = (metric) => TITLES[metric] ?? metric.replaceAll("_", " ");
const LEFT = 46, BOTTOM = 26, CELL_PX = 18, LEAST_HEIGHT = 120, MOST_HEIGHT = 560, MOST_HIGHEST = 8;
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

/** Return how many columns a heat map has that is so many pixels wide. */
export const columnsOf = (width) => Math.max(Math.ceil((width - LEFT) * devicePixelRatio), 0);

const placeOf = (start, r) => ({ host: start?.hosts[r] ?? "", device: start?.devices[r] ?? "", nic: start?.nics[r] ?? "" });

/**
 * A heat map with its scale, its choice of metrics and its read-out (`root`), and the table of the ranks whose means are
 * highest (`highest`). choose(metric): the reader wants another metric; answered by `show`.
 */
export class HeatMap {
  constructor(choose) {
    this.choice = el("select", { "aria-label": "Metric", on: { change: () => choose(this.choice.value) } });
    this.ends = [el("span"), el("span")];
    this.canvas = el("canvas", { tabindex: "0", role: "img" });
    this.status = el("p", { role: "status", class: "readout" }, "Point at a cell, or move with the arrow keys; Enter or a click keeps it.");
    this.details = el("div", { class: "details" });
    this.extent = el("span", { class: "quiet" });
    this.scale = el("canvas", { class: "scale", width: 256, height: 1, "aria-hidden": "true" });
    const scale = this.scale.getContext("2d"), strip = scale.createImageData(256, 1);
    new Uint32Array(strip.data.buffer).set(TABLE);
    scale.putImageData(strip, 0, 0);
    this.root = el("section", { class: "card ranks", "aria-label": "Heat map" },
      el("div", { class: "toolbar" }, this.choice, el("span", { class: "scale-of" }, this.ends[0], this.scale, this.ends[1]), this.extent),
      this.canvas, this.status, this.details);
    this.highest = el("section");
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerdown", (event) => { this.#point(event); this.#keep(); });
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    this.sized = new ResizeObserver(() => {
      if (this.found && this.canvas.clientWidth !== this.drawn) this.#draw();  // its height is of our own making
    });
    this.sized.observe(this.canvas);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.recolor = () => this.found && this.#draw();
    this.scheme.addEventListener("change", this.recolor);
  }

  /** Draw a metric, as /api/runs/ID/ranks answers. The cell that was pointed at stays. */
  show(found) {
    const { num_ranks: ranks, steps, metric, metrics } = found, kept = this.at && [this.at[0], this.found.steps[this.at[1]]];
    Object.assign(this, { found, metric, values: decoded(found.values), at: null, picture: null });
    if (this.choice.options.length !== metrics.length) this.choice.replaceChildren(...metrics.map((name) => el("option", { value: name }, titled(name))));
    this.choice.value = metric;
    this.extent.textContent = this.#extent();
    this.highest.replaceChildren(...this.#highest());
    const s = kept ? steps.findIndex((step) => step >= kept[1]) : -1;
    if (s >= 0 && kept[0] < ranks) this.#show(kept[0], s);
    else this.#draw();
  }

  close() {
    this.sized.disconnect();
    this.scheme.removeEventListener("change", this.recolor);
  }

  #extent() {
    const { num_ranks: ranks, steps, records = steps.length } = this.found, size = `${count(ranks)} ranks \u00d7 ${count(records)} records`;
    return records > steps.length ? `${size}; each column shows the largest of ${count(Math.ceil(records / steps.length))}` : size;
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

  // In two colours: of all that a cell can have, one of them differs.
  #outline(context) {
    const { num_ranks: ranks, steps } = this.found, [r, s] = this.at, { width, height } = this.size, style = getComputedStyle(this.canvas);
    const box = [LEFT + (s * width) / steps.length, (r * height) / ranks, Math.max(width / steps.length, 2), Math.max(height / ranks, 2)];
    for (const [name, by] of [["--card", 3], ["--ink", 1]]) {
      context.lineWidth = 2;
      context.strokeStyle = style.getPropertyValue(name);
      context.strokeRect(box[0] - by, box[1] - by, box[2] + 2 * by, box[3] + 2 * by);
    }
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
  #highest() {
    const means = this.found.means.map((mean, rank) => ({ rank, mean })).filter(({ mean }) => mean !== null).sort((a, b) => b.mean - a.mean);
    if (!means.length) return [];
    const median = means[means.length >> 1].mean;
    return [el("h2", {}, `Highest ${titled(this.metric)}`), table("Highest ranks", ["rank", "host", "device", "mean", "times the median"], means.slice(0, MOST_HIGHEST).map(({ rank, mean }) => [
      String(rank), this.#everywhere(rank, "host"), this.#everywhere(rank, "device"), written(mean, this.#unit), median ? (mean / median).toFixed(2) : "\u2013"]), { className: "wordy" })];
  }

  #description() {
    const { num_ranks: ranks, steps } = this.found;
    return `Heat map of ${titled(this.metric)}: ${ranks} ranks down, ${steps.length} steps across, colours from ${written(this.low, this.#unit)} to ${written(this.high, this.#unit)}. Arrow keys move a cell; the table below has the highest ranks.`;
  }
}
