// The curves of a run over steps, tokens or time, with its events on the axis; raw points where the reader zooms.

import * as api from "./api.js";
import { el, failure, link, menu, quiet, segments, table, throttled } from "../charts/dom.js";
import { seconds } from "./table.js";
import { place, rangeOf, remember } from "./address.js";
import { Chart, count, duration, nearest, written } from "../charts/charts.js";

const SMOOTHING = 3;
const POINTS = 1000, MOST_ASKED = 200, MOST_NEW = 2000, DRAW_MS = 250, MOST_EVENTS = 200;

/** Charts in their order. of: metrics [name, label, style, colour]; tables: metrics by corpus or task; isExact: never smoothed. */
const CHARTS = [
  { id: "loss", title: "Loss, nats per token", isWide: true, height: 300, of: [["loss", "training", "line", "--train"], ["validation_loss", "validation", "dots", "--held"]] },
  { id: "corpus-loss", title: "Held-out loss by corpus, nats per token", table: "corpus_validation_loss/", style: "dots" },
  { id: "phases", title: "Where a step\u2019s time goes", unit: "share", of: [
    ["forward_share", "forward", "area", 0], ["backward_share", "backward", "area", 4], ["optimizer_share", "optimizer", "area", 2],
    ["communication_share", "blocked on communication", "area", 1], ["data_wait_share", "waiting for data", "area", 3]] },
  { id: "speed", title: "Tokens per second", fromZero: true, of: [["tokens_per_s", "all ranks", "line", "--train"]] },
  { id: "mixture", title: "Mixture, share of samples", unit: "share", table: "corpus_shares/", style: "area" },
  { id: "bits", title: "Held-out text, bits per byte", of: [["validation_bits_per_byte", "validation", "dots", "--held"]] },
  { id: "mfu", title: "Model FLOPs utilisation", unit: "share", fromZero: true, of: [["mfu", "MFU", "line", 0], ["hfu", "HFU", "line", 2]] },
  { id: "waits", title: "Data wait and exposed communication", unit: "share", fromZero: true, of: [["data_wait_share", "data wait", "line", 3], ["communication_share", "exposed communication", "line", 1]] },
  { id: "rewards", title: "Rewards", of: [["reward_chosen", "chosen", "line", 2], ["reward_rejected", "rejected", "line", 1], ["reward_margin", "margin", "line", 0]] },
  { id: "accuracy", title: "Accuracy of rewards", unit: "share", of: [["reward_accuracy", "training", "line", "--train"], ["validation_reward_accuracy", "held out", "dots", "--held"]] },
  { id: "tasks", title: "Tasks", table: "task_scores/", style: "dots" },
  { id: "grad-norm", title: "Gradient norm", of: [["grad_norm", "before clipping", "line", "--train"]] },
  { id: "rate", isExact: true, title: "Learning rate", fromZero: true, of: [["learning_rate", "learning rate", "line", "--train"]] },
  { id: "memory", isExact: true, title: "Peak memory", unit: "bytes", fromZero: true, of: [["memory_bytes", "first process", "line", "--train"]] },
  { id: "epochs", isExact: true, title: "Epochs by corpus", fromZero: true, table: "corpus_epochs/", style: "line" },
];
const TRAINED = new Set(["spike", "skip"]);
const LABELLED = new Set(["resume", "rescale", "mixture", "spike", "stop"]);

const rowsLink = (id, step, text) => link(`#/run/${encodeURIComponent(id)}/rows?step=${step}`, text);

/** Return x and y without the places where y is unknown. */
function known(x, y) {
  const places = [], values = [];
  for (let i = 0; i < x.length; i++) if (y[i] !== null && y[i] !== undefined) {
    places.push(x[i]);
    values.push(y[i]);
  }
  return { x: places, y: values };
}

/** Return the metrics of charts in lists of at most MOST_ASKED; those of a chart are together, as a stack needs one x. */
function batched(charts) {
  const found = [["step"]], seen = new Set(found[0]);
  for (const { names } of charts) {
    const own = names.map(([name]) => name).filter((name) => !seen.has(name));
    for (let i = 0; i < own.length; i += MOST_ASKED) {
      const part = own.slice(i, i + MOST_ASKED);
      if (found.at(-1).length + part.length > MOST_ASKED) found.push([]);
      found.at(-1).push(...part);
    }
    for (const name of own) seen.add(name);
  }
  return found;
}

export class CurvesView {
  constructor(body, page, query) {
    Object.assign(this, { body, page, run: page.run, charts: [], along: query.get("x") || "step", smoothing: Number(query.get("smooth") ?? SMOOTHING), range: rangeOf(query) });
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
    this.choices = CHARTS.map(({ title }) => el("label", {}, el("input", { type: "checkbox", on: { change: () => this.#choose() } }), title));
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
      menu("Charts", el("div", { class: "choices" }, this.choices)),
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
    for (const [i, label] of this.choices.entries()) {
      label.hidden = !this.#layersOf(CHARTS[i]).names.length;
      label.querySelector("input").checked = !this.chosen || this.chosen.has(CHARTS[i].id);
    }
  }

  #choose() {
    const there = CHARTS.filter((_, i) => !this.choices[i].hidden);
    const shown = CHARTS.filter((_, i) => !this.choices[i].hidden && this.choices[i].querySelector("input").checked);
    this.chosen = shown.length === there.length || !shown.length ? null : new Set(shown.map(({ id }) => id));
    this.#again();
  }

  #width() {
    return this.smoothing ? 2 ** this.smoothing + 1 : 0;
  }

  get #metrics() {
    return this.run.metrics.map((metric) => metric.name);
  }

  async load() {
    const mine = (this.turn = (this.turn || 0) + 1);
    this.isLoading = true;
    this.arrived = [];  // points that the answer may not have yet
    this.wanted = CHARTS.filter(({ id }) => !this.chosen || this.chosen.has(id)).map((chart) => this.#layersOf(chart)).filter(({ names }) => names.length);
    this.#writeChooser();
    const batches = batched(this.wanted);
    try {
      const data = await this.#read(batches);
      if (mine !== this.turn) return;
      this.data = data;
      this.batches = batches;
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

  #layersOf(chart) {
    const there = new Set(this.#metrics);
    const names = chart.table
      ? this.#metrics.filter((name) => name.startsWith(chart.table)).map((name, i) => [name, name.slice(chart.table.length), chart.style, i])
      : chart.of.filter(([name]) => there.has(name));
    return { chart, names: chart.style === "area" && names.length < 2 ? [] : names };
  }

  #draw() {
    if (!this.data) return;
    const source = this.detail || this.data, all = this.#marks(), plain = all.map((mark) => ({ ...mark, isLabelled: false }));
    let before = null;
    for (const { chart, names } of this.wanted) {
      const marks = chart.isWide ? all : plain;
      const layers = names.map(([name, label, style, color]) => ({ name: label, style, color, ...(source.get(name) || { x: [], y: [] }) }));
      const hasValues = layers.some((layer) => layer.x.length);
      let drawn = this.charts.find((one) => one.options.id === chart.id);
      if (!drawn && hasValues) {
        drawn = new Chart(this.grid, { height: 190, ...chart, layers, along: this.along, marks, sync: "run", smoothing: chart.isExact ? 0 : this.#width(), onRange: (from, to, one) => this.#onRange(from, to, one), onPick: (at, one) => this.#onPick(at, one) });
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
    const found = await this.#read(this.batches, { from: range[0] - room, to: range[1] + room }).catch(() => null);
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
  async #read(batches, range = {}) {
    const found = await Promise.all(batches.map((names) => api.curves(this.page.id, names, this.along, { points: POINTS, ...range })));
    return new Map(found.flatMap(({ x, series }, i) => batches[i].map((name) => [name, known(x, series[name] || [])])));
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
        if (at === own.x[own.x.length - 1]) own.y[own.y.length - 1] = value;
        continue;
      }
      own.x.push(at);
      own.y.push(value);
    }
  }

  #isNew(name) {
    return !this.data.has(name) && CHARTS.some((chart) => (chart.table ? name.startsWith(chart.table) : chart.of.some(([own]) => own === name))) && !this.#metrics.includes(name);
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
    const first = seconds(this.run.starts?.[0]?.time ?? this.run.events?.[0]?.time);
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
