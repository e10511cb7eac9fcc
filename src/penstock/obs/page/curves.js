// The curves of a run over steps, tokens or time, with its events on the axis; raw points where the reader zooms.

import { el, failure, link, menu, quiet, segments, table, throttled } from "./dom.js";
import { place, rangeOf, remember } from "./address.js";
import { Chart, count, duration, nearest, seconds, written } from "./charts.js";

const SMOOTHING = 3;
const POINTS = 1000, MOST_NEW = 2000, DRAW_MS = 250, MOST_EVENTS = 200;

const TRAINED = new Set(["spike", "skip"]);
const LABELLED = new Set(["resume", "rescale", "mixture", "spike", "stop"]);

const rowsLink = (id, step, text) => link(`#/run/${encodeURIComponent(id)}/rows?step=${step}`, text);

/** Return whether an axis begins logarithmic: the highest of the positive values hides the others. */
function isSpread(layers, ratio) {
  const values = layers.flatMap(({ y }) => y).filter((value) => value !== null).sort((a, b) => a - b);
  return values.length > 0 && values[0] > 0 && values.at(-1) > ratio * values[values.length >> 1];
}

export class CurvesView {
  constructor(body, page, query) {
    Object.assign(this, { body, page, source: page.source, run: page.run, charts: [], along: query.get("x") || "step", smoothing: Number(query.get("smooth") ?? SMOOTHING), range: rangeOf(query) });
    this.chosen = query.get("charts") ? new Set(query.get("charts").split(",")) : null;
    this.picked = el("p", { class: "picked", role: "status" });
    this.#tools();
    this.grid = el("div", { class: "charts" });
    this.events = el("section", { class: "events" });
    body.append(this.tools, el("h2", { class: "unseen" }, "Curves"), this.grid, this.events);
    this.ask = quiet(120, () => this.#zoomed());
    this.draw = throttled(DRAW_MS, () => this.#draw());
    this.load();
  }

  #tools() {
    this.choices = el("div", { class: "choices" });
    this.tools = el("div", { class: "toolbar" },
      segments("Horizontal axis", [["step", "Steps"], ["tokens", "Tokens"], ["time", "Time"], ...(this.page.row.cost > 0 ? [["money", "Money"]] : [])], this.along, (along) => {
        this.along = along;
        this.range = null;
        this.#again();
      }),
      el("label", { class: "smoothing" }, "Smoothing ", el("input", { type: "range", min: "0", max: "6", step: "1", value: String(this.smoothing), on: { input: (event) => {
        this.smoothing = Number(event.target.value);
        for (const chart of this.charts) if (!chart.options.isExact) chart.setSmoothing(this.#width());
        this.#remember();
      } } })),
      menu("Charts", this.choices),
      el("span", { class: "hint quiet" }, "click a point for its rows, drag to zoom, double-click for the whole run"));
  }

  #again() {
    for (const chart of this.charts) chart.destroy();
    this.charts = [];
    this.#remember();
    this.load();
  }

  // The address holds what is shown; see address.js.
  #remember() {
    const [from, to] = this.range || [];
    remember(`/run/${encodeURIComponent(this.page.id)}/curves`, {
      x: this.along === "step" ? "" : this.along, smooth: this.smoothing === SMOOTHING ? "" : this.smoothing,
      from: place(from), to: place(to), charts: this.chosen ? [...this.chosen].join(",") : "" });
  }

  // In place: a box keeps the focus when it is checked.
  #writeChooser() {
    const written = this.run.charts.map(({ id }) => id).join();
    if (written !== this.choosable) this.choices.replaceChildren(...this.run.charts.map(({ title }) => el("label", {}, el("input", { type: "checkbox", on: { change: () => this.#choose() } }), title)));
    this.choosable = written;
    for (const [i, { id }] of this.run.charts.entries()) this.choices.children[i].firstChild.checked = !this.chosen || this.chosen.has(id);
  }

  #choose() {
    const shown = this.run.charts.filter((_, i) => this.choices.children[i].firstChild.checked);
    this.chosen = shown.length === this.run.charts.length || !shown.length ? null : new Set(shown.map(({ id }) => id));
    this.#again();
  }

  #width() {
    return this.smoothing ? 2 ** this.smoothing + 1 : 0;
  }

  async load() {
    const mine = (this.turn = (this.turn || 0) + 1);
    this.isLoading = true;
    this.arrived = [];  // points that the answer may not have yet
    this.wanted = this.run.charts.filter(({ id }) => !this.chosen || this.chosen.has(id));
    this.#writeChooser();
    try {
      const data = await this.#read();
      if (mine !== this.turn) return;
      this.data = data;
      this.mostPoints = this.#numPoints() + MOST_NEW;
      this.isLoading = false;
      for (const points of this.arrived) this.points(points);
      this.detail = null;
      this.#draw();
      this.#writeEvents();
      if (this.range) this.ask();
    } catch (error) {
      if (mine === this.turn) this.grid.replaceChildren(failure(error));
    } finally {
      if (mine === this.turn) this.isLoading = false;
    }
  }

  #draw() {
    if (!this.data) return;
    const source = this.detail || this.data, all = this.#marks(), plain = all.map((mark) => ({ ...mark, isLabelled: false }));
    let before = null;
    for (const { layers: own, logFrom, ...chart } of this.wanted) {
      const marks = chart.isWide ? all : plain;
      const layers = own.map(({ metric, label, style, color }) => ({ name: label, style, color, ...(source.get(metric) || { x: [], y: [] }) }));
      const hasValues = layers.some((layer) => layer.x.length);
      let drawn = this.charts.find((one) => one.options.id === chart.id);
      if (!drawn && hasValues) {
        drawn = new Chart(this.grid, { height: 190, ...chart, layers, log: logFrom && isSpread(layers, logFrom), levels: (chart.id === "loss" && this.run.levels) || [], along: this.along, marks, sync: "run", smoothing: chart.isExact ? 0 : this.#width(), onRange: (from, to, one) => this.#onRange(from, to, one), onPick: (at, one) => this.#onPick(at, one) });
        this.charts.push(drawn);
        if (this.range) drawn.zoom(...this.range, { isTold: true });
        if (before) before.figure.after(drawn.figure);
        else this.grid.prepend(drawn.figure);
      } else if (drawn) {
        drawn.options.marks = marks;
        drawn.setLayers(layers);
      }
      before = drawn || before;
    }
    if (!this.charts.length) this.grid.replaceChildren(el("p", { class: "empty" }, "No step is recorded yet. The curves begin here with the first one."));
    else this.grid.querySelector(".empty")?.remove();
  }

  #onRange(from, to, chart) {
    this.range = from === null ? null : [from, to];
    for (const other of this.charts) if (other !== chart) other.zoom(from, to, { isTold: true });
    this.#remember();
    if (from === null) {
      this.detail = null;
      this.#draw();
    } else this.ask();
  }

  // A click on a point, or Enter: the way from a spike to its text.
  #onPick(at, chart) {
    const step = this.along === "step" ? Math.round(at) : this.#stepAt(at);
    if (!(step >= 1)) return;
    const loss = this.data.get("loss"), value = loss?.x.length ? loss.y[nearest(loss.x, at)] : null;
    this.picked.replaceChildren(`step ${count(step)}${value === null ? "" : `, loss ${written(value)}`}: `, rowsLink(this.page.id, step, "what it trained on"));
    chart.figure.append(this.picked);
  }

  #stepAt(at) {
    const steps = (this.detail || this.data).get("step");
    return steps?.x.length ? steps.y[nearest(steps.x, at)] : null;
  }

  async #zoomed() {
    if (!this.range) return;
    const range = this.range, room = (range[1] - range[0]) * 0.05;
    const found = await this.#read({ from: range[0] - room, to: range[1] + room }).catch(() => null);
    if (!found || range !== this.range) return;
    this.detail = found;
    this.#draw();
  }

  points({ x, values }) {
    if (this.isLoading) this.arrived.push({ x, values });
    if (!this.data) return;
    if (Object.keys(values).some((name) => this.#isNew(name))) return this.#learn();
    this.#append({ x, values });
    if (!this.isLoading && this.#numPoints() > this.mostPoints) this.load();
    this.draw();
  }

  /** Return metric -> its points, of the whole run or of a range. */
  #read(range = {}) {
    const charts = this.wanted.map(({ layers }) => layers.map(({ metric }) => metric));
    return this.source.curves(this.page.id, [["step"], ...charts], this.along, { points: POINTS, ...range });
  }

  #numPoints() {
    return (this.data.get("loss") || this.data.get("step")).x.length;
  }

  #append({ x, values }) {
    const at = x[this.along];
    for (const [name, value] of Object.entries({ step: x.step, ...values })) {
      const own = this.data.get(name);
      if (!own || value === null || value === undefined) continue;
      if (own.x.length && at <= own.x[own.x.length - 1]) {
        if (at === own.x[own.x.length - 1]) own.y[own.y.length - 1] = value;  // the mean of a point stays
        continue;
      }
      own.x.push(at);
      own.y.push(value);
      own.means?.push(value);
    }
  }

  #isNew(name) {
    return !this.run.metrics.some((metric) => metric.name === name);
  }

  // A metric that was not there when the page was opened: the first validation, a new corpus.
  async #learn() {
    if (this.isLearning) return;
    this.isLearning = true;
    await this.page.again();
    this.isLearning = false;
  }

  eventsRead(run) {
    this.run = run;
    this.#draw();
    this.#writeEvents();
  }

  again(run) {
    this.run = run;
    this.load();
  }

  #marks() {
    const events = (this.run.events || []).slice(-MOST_EVENTS).filter((event) => event.kind !== "start" || event.step > 0);
    return events.map((event) => ({ x: this.#placeOf(event), text: event.text, isLabelled: LABELLED.has(event.kind) && events.length < 40 })).filter((mark) => mark.x !== null);
  }

  #placeOf(event) {
    if (this.along === "step") return event.step;
    const steps = this.data?.get("step");
    return steps?.x.length ? steps.x[nearest(steps.y, event.step)] : null;
  }

  #writeEvents() {
    const events = (this.run.events || []).slice(-MOST_EVENTS).reverse();
    const first = seconds(this.run.started ?? this.run.events?.[0]?.time);
    const rows = events.map((event) => [count(event.step), el("span", { class: `kind ${event.kind}` }, event.kind),
      TRAINED.has(event.kind) ? el("span", {}, event.text, " \u00b7 ", rowsLink(this.page.id, event.step, "its text")) : event.text,
      event.time ? `after ${duration(seconds(event.time) - first)}` : ""]);
    this.events.replaceChildren(el("h2", {}, "Events"), rows.length ? table("Events", ["step", "kind", "what happened", "when"], rows, { className: "wordy" }) : el("p", { class: "quiet" }, "None yet."));
  }

  close() {
    this.turn = -1;
    this.data = null;  // a timer that is still to come draws nothing
    for (const chart of this.charts) chart.destroy();
  }
}
