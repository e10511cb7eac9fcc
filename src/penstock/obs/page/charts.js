// Charts over uPlot (vendor/uPlot.iife.min.js, a global): lines, dots and stacked areas that read out their values,
// mark events, zoom, smooth, and follow the keyboard. Text is set as text, never as markup.

const { uPlot } = globalThis;
const PALETTE = 8;
const FLAG_PX = 17, RING_PX = 4;
const ENGLISH = new Intl.NumberFormat("en");  // toLocaleString would make one for each number
const AFTER_DRAG_MS = 100;  // a drag ends in a click too

/** Return a value as text; unit: "share", "bytes", "s" or a number without one. */
export function written(value, unit = "") {
  if (value === null || value === undefined || Number.isNaN(value)) return "\u2013";
  if (!Number.isFinite(value)) return value > 0 ? "\u221e" : "\u2212\u221e";
  if (unit === "share") return Number((100 * value).toPrecision(3)) + "%";
  if (unit === "s") return duration(value);
  if (unit === "bytes") {
    for (const [size, name] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]])
      if (Math.abs(value) >= size) return Number((value / size).toPrecision(3)) + " " + name;
    return value + " B";
  }
  const size = Math.abs(value);
  if (size && (size < 0.001 || size >= 1e15)) return value.toExponential(2).replace(/\.?0*e\+?/, "e");
  for (const [power, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (size >= Math.max(power, 1e4)) return Number((value / power).toPrecision(4)) + letter;
  return ENGLISH.format(Number(value.toPrecision(4)));
}

/** Return a count with all its digits. */
export const count = (value) => (value === null || value === undefined ? "\u2013" : ENGLISH.format(Math.round(value)));

/** Return seconds as "3 d 4 h", "2 h 5 min", "3 min 20 s", "1.2 s" or "15 ms". */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "\u2013";
  const sign = seconds < 0 ? "\u2212" : "", size = Math.abs(seconds);
  if (size === 0) return "0 s";
  if (size < 1) return sign + Number((1000 * size).toPrecision(3)) + " ms";
  if (size < 60) return sign + Number(size.toPrecision(3)) + " s";
  const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const first = units.findIndex(([unit]) => size >= unit);
  const [whole, name] = units[first], [part, partName] = units[first + 1] || [1, ""];
  const rest = Math.floor((size % whole) / part);
  return sign + Math.floor(size / whole) + " " + name + (rest && partName ? " " + rest + " " + partName : "");
}

/** Return Unix seconds of a time, which may be ISO 8601. */
export const seconds = (time) => (typeof time === "string" ? Date.parse(time) / 1000 : time);

/** Return how long ago a time was. */
export function ago(time) {
  const since = Date.now() / 1000 - seconds(time);
  if (time === null || time === undefined || Number.isNaN(since)) return "\u2013";
  return since < 5 ? "now" : duration(Math.floor(since)) + " ago";
}

/** Return the centred mean of some `width` neighbours of each value, twice over, so that a spike is a hill and not a box. */
export function smoothed(values, width) {
  const half = (width + 1) >> 1;
  return mean(mean(values, half), half);
}

function mean(values, width) {
  const half = width >> 1, sums = new Float64Array(values.length + 1), counts = new Uint32Array(values.length + 1);
  for (let i = 0; i < values.length; i++) {
    const known = values[i] !== null && values[i] !== undefined && Number.isFinite(values[i]);
    sums[i + 1] = sums[i] + (known ? values[i] : 0);
    counts[i + 1] = counts[i] + (known ? 1 : 0);
  }
  return values.map((value, i) => {
    if (value === null || value === undefined) return value;
    const low = Math.max(i - half, 0), high = Math.min(i + half + 1, values.length);
    return counts[high] > counts[low] ? (sums[high] - sums[low]) / (counts[high] - counts[low]) : null;
  });
}

const made = (tag, className, text = "") => {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.textContent = text;
  return element;
};
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const dark = globalThis.matchMedia("(prefers-color-scheme: dark)");
const xWritten = (value, along) => (along === "step" ? count(value) : along === "time" ? duration(value) : along === "money" ? value.toFixed(2) : written(value));

/**
 * A chart in a `figure`.
 *
 * options: title; unit; along: "step", "tokens", "time" (seconds), or another name; layers: see `setLayers`;
 * marks: [{x, text, isLabelled}]; levels: [[name, value]]; fromZero; log; height; smoothing: points, 0 for none;
 * sync: charts of one key share the cursor; onRange(from, to): the reader zoomed; nulls for the whole;
 * onPick(x, chart): the reader clicked, or pressed Enter at, the point at x.
 */
export class Chart {
  constructor(host, options) {
    this.options = { unit: "", along: "step", marks: [], levels: [], height: 200, smoothing: 0, ...options };
    this.isLog = Boolean(options.log);
    this.range = null;
    this.figure = host.appendChild(made("figure", "chart" + (options.isWide ? " wide" : "")));
    if (options.id) this.figure.id = options.id;
    const caption = this.figure.appendChild(made("figcaption"));
    caption.append(made("h3", "", options.title));
    this.tools = caption.appendChild(made("div", "tools"));
    this.whole = this.#button("whole run", () => this.zoom(null, null));
    this.whole.hidden = true;
    for (const [sign, title, factor] of [["\u2212", "zoom out", 2], ["+", "zoom in", 0.5]]) {
      const button = this.#button(sign, () => this.#zoomBy(factor));
      button.title = title;
      button.setAttribute("aria-label", title);
    }
    if (!this.#isStacked(options.layers || [])) {
      this.logButton = this.#button("log", () => {
        this.isLog = !this.isLog;
        this.logButton.setAttribute("aria-pressed", this.isLog);
        this.#build();
      });
      this.logButton.title = "logarithmic axis";
      this.logButton.setAttribute("aria-pressed", this.isLog);
    }
    this.legend = this.figure.appendChild(made("ul", "legend"));
    this.plot = this.figure.appendChild(made("div", "plot"));
    this.plot.tabIndex = 0;
    this.plot.setAttribute("role", "group");
    this.status = this.figure.appendChild(made("p", "unseen"));
    this.status.setAttribute("role", "status");
    this.read = made("div", "read");
    this.read.hidden = true;
    this.plot.addEventListener("keydown", (event) => this.#key(event));
    this.plot.addEventListener("blur", () => this.#leave());
    this.plot.addEventListener("pointermove", (event) => this.#touch(event));
    this.plot.addEventListener("pointerdown", (event) => this.#touch(event));
    this.resized = new ResizeObserver(() => this.#resize());
    this.resized.observe(this.plot);
    this.recolor = () => this.#build();
    dark.addEventListener("change", this.recolor);
    this.setLayers(options.layers || []);
  }

  /**
   * Draw these layers: {name, x, y, means, style, color}. means: of the records around each point, which are smoothed and
   * stacked instead of y; style: "line", "dots" or "area" (areas are stacked in their order); color: 0 to 7 or the name of
   * a CSS property.
   */
  setLayers(layers) {
    this.layers = layers;
    this.plot.setAttribute("aria-label", this.#description());
    // A few points are not smoothed, so the number of lines changes with the points too.
    if (!this.uplot || this.outline !== this.#outline(this.#lines())) return this.#build();
    this.uplot.setData(this.#data(), this.range === null);
    if (this.range) this.uplot.redraw();
    this.#legendValues(null);
  }


  setSmoothing(points) {
    this.options.smoothing = points;
    this.#build();
  }

  /** Show [from, to] of the axis; nulls for the whole. */
  zoom(from, to, { isTold = false } = {}) {
    this.range = from === null ? null : [from, to];
    this.whole.hidden = this.range === null;
    if (this.uplot) this.uplot.setData(this.uplot.data, true);
    if (!isTold) this.options.onRange?.(from, to, this);
  }

  destroy() {
    dark.removeEventListener("change", this.recolor);
    this.resized.disconnect();
    this.uplot?.destroy();
    this.figure.remove();
  }

  #button(text, act) {
    const button = this.tools.appendChild(made("button", "", text));
    button.type = "button";
    button.addEventListener("click", act);
    return button;
  }

  #isStacked(layers = this.layers) {
    return layers.length > 0 && layers.every((layer) => layer.style === "area");
  }

  #color(color) {
    const name = typeof color === "string" ? color : "--c" + ((color ?? 0) % PALETTE);
    return getComputedStyle(this.figure).getPropertyValue(name).trim() || "#4477aa";
  }

  // The drawn lines: a layer that is smoothed is drawn twice, faint as it is and plain as its mean.
  #lines() {
    const { smoothing } = this.options, lines = [];
    for (const layer of this.layers) {
      const isSmooth = smoothing > 1 && (layer.style || "line") === "line" && layer.x.length > 2 * smoothing;
      if (isSmooth) lines.push({ layer, kind: "raw", x: layer.x, y: layer.y });
      lines.push({ layer, kind: "main", x: layer.x, y: isSmooth ? smoothed(layer.means ?? layer.y, smoothing) : layer.style === "area" ? layer.means ?? layer.y : layer.y });
    }
    return lines;
  }

  #outline(lines) {
    return lines.map(({ layer, kind }) => [layer.name, layer.style, layer.color, kind].join("\0")).join("\n");
  }

  #data() {
    this.lines = this.#lines();
    this.outline = this.#outline(this.lines);
    if (!this.lines.length) return [[]];
    const { x } = this.lines[0];
    const data = this.lines.every((line) => line.x === x)
      ? [x, ...this.lines.map((line) => line.y)]
      : uPlot.join(this.lines.map((line) => [line.x, line.y]));
    if (!this.#isStacked()) return data;
    const below = new Float64Array(data[0].length);
    return [data[0], ...data.slice(1).map((values) => values.map((value, i) => (below[i] += value ?? 0)))];
  }

  #build() {
    if (!this.layers) return;
    this.uplot?.destroy();
    this.uplot = null;
    this.#writeLegend();
    const data = this.#data(), width = this.plot.clientWidth;
    if (!width || !data[0].length) return;
    const colors = Object.fromEntries(["--muted", "--rule", "--card", "--ink", "--mark", "--level"].map((name) => [name, this.#color(name)]));
    this.colors = colors;
    const { along, unit } = this.options, isStacked = this.#isStacked();
    const font = "12px system-ui, sans-serif";
    const dots = this.lines.filter(({ layer }) => layer.style === "dots");
    const series = this.lines.map((line) => {
      const { layer, kind } = line, above = dots.length - 1 - dots.indexOf(line);  // a larger ring shows around the dots above it
      const stroke = this.#color(layer.color), isDots = layer.style === "dots";
      const faint = kind === "raw" ? 0.38 : 1;
      return {
        stroke: withAlpha(stroke, isDots ? 0.6 : isStacked ? 0 : faint),
        width: kind === "raw" ? 1 : isDots ? 1.25 : isStacked ? 0 : 1.75,
        fill: isStacked ? withAlpha(stroke, 0.82) : undefined,
        spanGaps: isDots || layer.x !== data[0],
        points: isDots
          ? { show: data[0].length < 4000, size: (layer.x.length > 60 ? 5 : 8) + RING_PX * above, fill: above ? colors["--card"] : stroke, stroke: dots.length > 1 ? stroke : colors["--card"], width: 1.5 }
          : { show: layer.x.length === 1, size: 7, fill: stroke },
      };
    });
    const bands = [];
    this.lines.forEach((_, i) => {
      if (isStacked && i > 0) bands.push({ series: [i + 1, i], fill: series[i].fill });
    });
    const hasFlags = this.options.marks.some((mark) => mark.isLabelled);
    this.uplot = new uPlot(
      {
        width,
        height: this.options.height + (hasFlags ? FLAG_PX : 0),
        padding: [hasFlags ? FLAG_PX + 6 : 8, 20, 0, 0],
        legend: { show: false },
        scales: {
          x: { time: false, range: (_, low, high) => this.#across(low, high) },
          y: { distr: this.isLog && !isStacked ? 3 : 1, range: (_, low, high) => this.#up(low, high) },
        },
        axes: [
          { stroke: colors["--muted"], font, grid: { show: false }, ticks: { stroke: colors["--rule"], size: 5 }, space: 76, size: 34, gap: 4,
            values: (_, ticks) => ticks.map((tick) => xWritten(tick, along)), ...(along === "time" ? { incrs: TIMES } : {}) },
          { stroke: colors["--muted"], font, grid: { stroke: colors["--rule"], width: 1 }, ticks: { show: false }, space: 34, gap: 8,
            ...(unit === "bytes" ? { incrs: BYTES } : {}), values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : written(tick, unit))),
            size: (_, labels) => Math.max(34, 14 + 7 * Math.max(0, ...(labels || []).map((label) => (label || "").length))) },
        ],
        series: [{}, ...series],
        bands,
        cursor: {
          y: false,
          drag: { x: true, y: false, dist: 6, setScale: false },
          sync: this.options.sync ? { key: this.options.sync, scales: ["x", null] } : undefined,
          points: { size: 8, width: 2, stroke: colors["--card"], fill: (_, i) => this.#color(this.lines[i - 1].layer.color), show: !isStacked },
        },
        hooks: {
          drawAxes: [(u) => this.#drawMarks(u)],
          setCursor: [(u) => this.#point(u)],
          setSelect: [(u) => this.#select(u)],
          ready: [(u) => {
            u.over.addEventListener("dblclick", () => this.zoom(null, null));
            u.over.addEventListener("click", () => this.#pick(u));
          }],
        },
      },
      data,
      this.plot,
    );
    this.uplot.over.append(this.read);
    this.uplot.over.addEventListener("mouseleave", () => this.#leave());
  }

  #resize() {
    const width = this.plot.clientWidth;
    if (!width) return;
    if (!this.uplot) this.#build();
    else if (width !== this.uplot.width) this.uplot.setSize({ width, height: this.uplot.height });
  }

  #across(low, high) {
    if (this.range) return this.range;
    if (low === null) return [0, 1];
    return high > low ? [low, high] : [low - 0.5, high + 0.5];
  }

  #up(low, high) {
    if (this.#isStacked()) return [0, Math.max(1, high ?? 1) > 1.02 ? high : 1];
    for (const [, value] of this.options.levels) [low, high] = [Math.min(low ?? value, value), Math.max(high ?? value, value)];
    if (low === null) return this.isLog ? [0.1, 1] : [0, 1];
    if (this.isLog) return [(low > 0 ? low : 1e-9) / 1.15, Math.max(high, 1e-9) * 1.15];
    if (this.options.fromZero) low = Math.min(low, 0);
    const isFlat = high - low <= 1e-9 * Math.abs(high);  // what is left of rounding is no shape
    const room = ((isFlat ? Math.abs(high) : high - low) || 1) * 0.06;
    return [this.options.fromZero && low === 0 ? 0 : low - room, high + room];
  }

  #pick(u) {
    const { left, idx } = u.cursor;
    if (left >= 0 && idx !== null && idx !== undefined && performance.now() - (this.draggedAt ?? -1e9) > AFTER_DRAG_MS) this.options.onPick?.(u.data[0][idx], this);
  }

  #drawMarks(u) {
    const { ctx } = u, { left, top, width, height } = u.bbox, ratio = devicePixelRatio;
    ctx.save();
    ctx.lineWidth = ratio;
    ctx.font = `${12 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = "left";
    ctx.textBaseline = "alphabetic";
    let free = Infinity;
    for (const mark of [...this.options.marks].sort((a, b) => b.x - a.x)) {
      const x = u.valToPos(mark.x, "x", true);
      if (!(x >= left - 1 && x <= left + width + 1)) continue;
      ctx.strokeStyle = this.colors["--mark"];
      ctx.setLineDash(mark.isLabelled ? [4 * ratio, 3 * ratio] : [2 * ratio, 4 * ratio]);
      ctx.beginPath();
      ctx.moveTo(x, mark.isLabelled ? top - 4 * ratio : top);
      ctx.lineTo(x, top + height);
      ctx.stroke();
      if (!mark.isLabelled) continue;
      const wide = ctx.measureText(mark.text).width, from = clamp(x - wide / 2, left, Math.max(left, left + width - wide));
      if (from + wide + 8 * ratio > free) continue;  // the read-out and the list of events have it
      free = from;
      ctx.fillStyle = this.colors["--mark"];
      ctx.fillText(mark.text, from, top - 8 * ratio);
    }
    ctx.setLineDash([7 * ratio, 4 * ratio]);
    for (const [name, value] of this.options.levels) {
      const y = u.valToPos(value, "y", true);
      if (!(y >= top && y <= top + height)) continue;
      ctx.strokeStyle = ctx.fillStyle = this.colors["--level"];
      ctx.beginPath();
      ctx.moveTo(left, y);
      ctx.lineTo(left + width, y);
      ctx.stroke();
      ctx.textAlign = "right";
      ctx.fillText(`${name} ${written(value)}`, left + width, y - 5 * ratio);
    }
    ctx.restore();
  }

  #select(u) {
    if (u.select.width < 6) return;
    this.draggedAt = performance.now();
    const [from, to] = [u.select.left, u.select.left + u.select.width].map((place) => u.posToVal(place, "x"));
    u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    if (to > from) this.zoom(from, to);
  }

  // Values at the cursor. Data may be joined, so a layer's own nearest point is looked up in its own x.
  #point(u) {
    const { left, idx } = u.cursor;
    if (left === null || left === undefined || left < 0 || idx === null || idx === undefined) {
      this.#legendValues(null);
      this.read.hidden = true;
      return;
    }
    const at = u.data[0][idx];
    this.#legendValues(at);
    const isOwn = this.plot.matches(":hover") || this.plot.matches(":focus");
    this.read.hidden = !isOwn;
    if (!isOwn) return;
    const { along, unit } = this.options;
    const near = this.options.marks.filter((mark) => Math.abs(u.valToPos(mark.x, "x") - left) < 7);
    const rows = this.#values(at).map(({ layer, value, x }) => {
      const row = made("div", "line"), swatch = made("i", "swatch"), own = layer.style === "dots" && x !== at;
      swatch.style.background = this.#color(layer.color);
      row.append(swatch, made("span", "", layer.name), made("b", "", written(value, unit) + (own ? ` at ${along} ${xWritten(x, along)}` : "")));
      return row;
    });
    this.read.replaceChildren(made("div", "head", `${along} ${xWritten(at, along)}`), ...rows, ...near.map((mark) => made("div", "event", mark.text)));
    const room = u.over.clientWidth, wide = this.read.offsetWidth;
    this.read.style.left = clamp(left > room / 2 ? left - wide - 14 : left + 14, 0, Math.max(room - wide, 0)) + "px";
  }

  #values(at) {
    return this.layers
      .filter((layer) => layer.x.length)
      .map((layer) => {
        const i = nearest(layer.x, at);
        return { layer, value: layer.y[i], x: layer.x[i] };
      });
  }

  #leave() {
    this.read.hidden = true;
    if (this.uplot) this.uplot.setCursor({ left: -10, top: -10 });
    this.#legendValues(null);
  }

  #touch(event) {
    this.touched = null;
    if (event.pointerType === "mouse" || !this.uplot) return;
    const box = this.uplot.over.getBoundingClientRect(), left = clamp(event.clientX - box.left, 0, box.width);
    this.touched = this.uplot.posToVal(left, "x");
    this.uplot.setCursor({ left, top: 10 });
  }

  #key(event) {
    const u = this.uplot;
    if (!u || event.altKey || event.ctrlKey || event.metaKey) return;
    const x = u.data[0], { min, max } = u.scales.x;
    const arrow = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[event.key];
    if (arrow !== undefined) {
      this.touched = null;
      const last = x.length - 1, low = nearest(x, min), high = nearest(x, max);
      const isOn = u.cursor.left >= 0 && u.cursor.idx !== null && u.cursor.idx !== undefined;
      const index = clamp(isOn ? u.cursor.idx + arrow : high, low, Math.min(high, last));
      u.setCursor({ left: u.valToPos(x[index], "x"), top: 10 });
      const { along, unit } = this.options;
      const said = this.#values(x[index]).map(({ layer, value }) => `${layer.name} ${written(value, unit)}`);
      this.status.textContent = `${along} ${xWritten(x[index], along)}: ${said.join(", ")}`;
    } else if (event.key === "0") this.zoom(null, null);
    else if (event.key === "+") this.#zoomBy(0.5);
    else if (event.key === "-") this.#zoomBy(2);
    else if (event.key === "Enter") this.#pick(u);
    else if (event.key === "Escape") this.#leave();
    else return;
    event.preventDefault();
  }

  // Around the place that was touched, or is read out, or the middle.
  #zoomBy(factor) {
    const u = this.uplot;
    if (!u) return;
    const x = u.data[0], { min, max } = u.scales.x, [first, last] = [x[0], x[x.length - 1]];
    const at = this.touched ?? (u.cursor.left >= 0 ? clamp(u.posToVal(u.cursor.left, "x"), min, max) : null), half = ((max - min) / 2) * factor;
    const middle = at !== null && at >= min && at <= max ? at : (min + max) / 2;
    const [from, to] = [Math.max(middle - half, first), Math.min(middle + half, last)];
    if (from <= first && to >= last) this.zoom(null, null);
    else this.zoom(from, to);
  }

  #writeLegend() {
    this.legendValue = new Map();
    const items = this.layers.filter((layer) => layer.x.length).map((layer) => {
      const item = made("li"), swatch = made("i", "swatch " + (layer.style || "line"));
      swatch.style.background = this.#color(layer.color);
      const value = made("b");
      this.legendValue.set(layer, value);
      item.append(swatch, made("span", "", layer.name), value);
      return item;
    });
    this.legend.replaceChildren(...items);
    this.#legendValues(null);
  }

  #legendValues(at) {
    if (this.legendValue.size && !this.legendValue.has(this.layers.find((layer) => layer.x.length))) this.#writeLegend();
    for (const layer of this.legendValue.keys()) {
      const i = at === null ? lastKnown(layer.y) : nearest(layer.x, at);
      this.legendValue.get(layer).textContent = written(layer.y[i], this.options.unit);
    }
  }

  #description() {
    const { title, unit, along } = this.options;
    const parts = this.layers.filter((layer) => layer.x.length).map((layer) => {
      const known = layer.y.filter((value) => value !== null && value !== undefined && Number.isFinite(value));
      if (!known.length) return `${layer.name}: no value`;
      const [low, high] = known.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
      return `${layer.name} from ${written(known[0], unit)} to ${written(known[known.length - 1], unit)}, between ${written(low, unit)} and ${written(high, unit)}`;
    });
    return `${title}, by ${along}. ${parts.join("; ")}. Arrow keys read out values; plus, minus and 0 zoom.`;
  }
}

const TIMES = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400, 172800, 604800, 2592000];

const BYTES = Array.from({ length: 50 }, (_, power) => 2 ** power);

function withAlpha(color, alpha) {
  if (alpha === 1) return color;
  if (alpha === 0) return "transparent";
  const hex = color.length === 4 ? color.replace(/[^#]/g, "$&$&") : color;
  return hex.slice(0, 7) + Math.round(255 * alpha).toString(16).padStart(2, "0");
}

function lastKnown(values) {
  for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null && values[i] !== undefined) return i;
  return 0;
}

/** Return x, y and means without the places where y is unknown. */
export function known(x, y, means = null) {
  const places = x.map((_, i) => i).filter((i) => y[i] !== null && y[i] !== undefined), at = (values) => places.map((i) => values[i]);
  return { x: at(x), y: at(y), ...(means && { means: at(means) }) };
}

/** Return the index of the place nearest to `at` in ascending places. */
export function nearest(places, at) {
  let low = 0, high = places.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (places[middle] < at) low = middle + 1;
    else high = middle;
  }
  return low > 0 && at - places[low - 1] <= places[low] - at ? low - 1 : low;
}
