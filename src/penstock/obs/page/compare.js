// Runs over one another: curves by steps, tokens, time or money; where each was at the same place; their recipes.

import { el, failure, link, pill, segments, table } from "./dom.js";
import { setting } from "./recipe.js";
import { address, place, rangeOf, remember, takeAlong } from "./address.js";
import { Chart, count, duration, nearest, written } from "./charts.js";

const MOST = 8, POINTS = 800;
const METRICS = [
  ["loss", "Loss, nats per token", "", "line", true],
  ["validation_loss", "Validation loss, nats per token", "", "dots", false],
  ["validation_bits_per_byte", "Held-out text, bits per byte", "", "dots", false],
  ["tokens_per_s", "Tokens per second", "", "line", false],
  ["mfu", "Model FLOPs utilisation", "share", "line", false],
  ["communication_share", "Exposed communication", "share", "line", false],
  ["data_wait_share", "Data wait", "share", "line", false],
];
const AXES = [["step", "Same step"], ["tokens", "Same tokens"], ["time", "Same time"], ["money", "Same money"]];

export async function open(source, query) {
  const ids = (query.get("runs") || "").split(",").filter(Boolean).slice(0, MOST).map(decodeURIComponent);
  const [first, ...others] = ids;
  const [rows, found, ...runs] = await Promise.all([source.runs(), Promise.all(others.map((other) => source.compare(first, other))), ...ids.map((id) => source.run(id))]);
  return new Comparison(source, runs, rows, found, query);
}

class Comparison {
  constructor(source, runs, rows, compared, query) {
    const row = (id) => rows.find((one) => one.id === id) || {};
    this.leftOut = new Set(compared.flatMap((one) => one.left_out));
    Object.assign(this, { source, runs, rows, charts: [], title: "Compare", metrics: METRICS.filter(([name]) => !this.leftOut.has(name)), along: query.get("x") || "step", range: rangeOf(query), entries: runs.map((run, i) => ({ run, row: row(run.id), color: i })) });
    const hasMoney = this.entries.every(({ row: { cost } }) => cost > 0);
    if (this.along === "money" && !hasMoney) this.along = "step";
    const add = el("select", { "aria-label": "Run to add" },
      el("option", { value: "" }, "Add a run\u2026"), rows.filter((one) => !runs.some((run) => run.id === one.id)).map((one) => el("option", { value: one.id }, one.name)));
    add.disabled = runs.length >= MOST;
    const adder = el("form", { on: { submit: (event) => {
      event.preventDefault();
      if (add.value) this.#go([...runs.map((run) => run.id), add.value]);
    } } }, add, el("button", { type: "submit", class: "button", disabled: add.disabled }, "Add"));
    this.grid = el("div", { class: "charts" });
    this.same = el("section");
    this.common = el("button", { type: "button", class: "button", hidden: true, on: { click: () => this.#onRange(...this.shared, null) } }, "Common range");
    const chips = this.entries.map(({ run, row: { state }, color }) => {
      const swatch = el("i", { class: "swatch area" });
      swatch.style.background = `var(--c${color})`;
      return el("li", {}, swatch, link(`#/run/${encodeURIComponent(run.id)}`, run.name), state ? pill(state) : "",
        el("button", { type: "button", class: "plain", "aria-label": `Leave out ${run.name}`, on: { click: () => this.#go(runs.map((one) => one.id).filter((id) => id !== run.id)) } }, "\u00d7"));
    });
    this.root = el("div", { class: "page" }, el("div", { class: "title" }, el("h1", {}, "Compare"), runs.length > 1 && source.isLive ? takeAlong(this.entries.map(({ run }) => run.row.path)) : ""), el("ul", { class: "compared" }, chips, el("li", { class: "add" }, adder)),
      runs.length ? el("div", { class: "toolbar" }, segments("Align by", AXES.map(([value, text]) => [value, text, value === "money" && !hasMoney]), this.along, (along) => { this.along = along; this.range = null; this.#remember(); this.#load(); }),
        this.common, hasMoney ? "" : el("span", { class: "quiet" }, "Money needs the cost of every run.")) : el("p", { class: "empty" }, "Choose runs to compare."),
      [...new Set(compared.flatMap((one) => one.notes))].map((text) => el("p", { class: "notice" }, text)), this.failed = el("div"), this.#figures(), el("h2", { class: "unseen" }, "Curves"), this.grid, this.same, this.#recipes());
  }

  begin() {
    if (!this.runs.length) return;
    this.#load();
    const at = ({ run: id, cursor }) => { this.runs.find((run) => run.id === id).cursor = cursor; };
    this.end = this.source.follow?.(this.runs.map((run) => run.id), { points: () => this.#soon(), reset: () => this.#soon(), gone: () => this.#soon(), at }, () => this.runs.map((run) => run.cursor));
  }

  #go(ids) {
    location.hash = address("#/compare", { runs: ids.filter(Boolean).join(","), x: this.along === "step" ? "" : this.along });
  }

  #remember() {
    const [from, to] = this.range || [];
    remember("/compare", { runs: this.runs.map((run) => run.id).join(","), x: this.along === "step" ? "" : this.along, from: place(from), to: place(to) });
  }

  #onRange(from, to, chart) {
    this.range = from === null ? null : [from, to];
    for (const other of this.charts) if (other !== chart) other.zoom(from, to, { isTold: true });
    this.#remember();
  }

  #soon() {
    this.timer ??= setTimeout(() => { this.timer = null; this.#load(); }, 2000);
  }

  async #load() {
    const mine = (this.turn = (this.turn || 0) + 1), axis = this.along;
    const found = await Promise.all(this.entries.map(async ({ run }) => {
      const asked = [["step"], ...this.metrics.map(([name]) => [name])];  // also what no record has yet
      return this.source.curves(run.id, asked, axis, { points: POINTS }).catch((error) => Object.assign(new Map(), { error }));
    }));
    if (mine !== this.turn) return;
    this.failed.replaceChildren(...found.flatMap(({ error }, i) => error ? [failure(new Error(`${this.runs[i].name}: ${error.message}`))] : []));
    this.#share(found);
    const marks = this.#marks(found);
    const isNew = this.drawn !== this.along;
    this.drawn = this.along;
    if (isNew) for (const chart of this.charts.splice(0)) chart.destroy();
    for (const [name, title, unit, style, isWide] of this.metrics) {
      const layers = this.entries.map(({ run, color }, i) => ({ name: run.name, style, color, ...found[i].get(name) })).filter((layer) => layer.x?.length);
      const drawn = this.charts.find((chart) => chart.options.id === name);
      if (drawn) {
        drawn.options.marks = marks.map((mark) => ({ ...mark, isLabelled: isWide }));
        drawn.setLayers(layers);
      } else if (layers.length) {
        const made = new Chart(this.grid, { id: name, title, unit, fromZero: !name.includes("loss") && style === "line", isWide, height: isWide ? 300 : 190, along: this.along, layers, marks: marks.map((mark) => ({ ...mark, isLabelled: isWide })), sync: "compare", smoothing: style === "line" ? 9 : 0, onRange: (from, to, chart) => this.#onRange(from, to, chart) });
        this.charts.push(made);
        if (this.range) made.zoom(...this.range, { isTold: true });
      }
    }
    const same = await this.#same(found);
    if (mine === this.turn) this.same.replaceChildren(...same);
  }

  /** Offer the part of the axis that all runs have, if one has more. */
  #share(found) {
    const axes = found.map((of) => of.get("step")?.x ?? []).filter((x) => x.length);
    this.shared = [Math.max(...axes.map((x) => x[0])), Math.min(...axes.map((x) => x.at(-1)))];
    const [from, to] = this.shared;
    this.common.hidden = !(from < to && axes.some((x) => x[0] < from || x.at(-1) > to));
  }

  /** Return the changes of the mixture while each run trained, as marks of a chart. */
  #marks(found) {
    return this.runs.flatMap((run, i) => changes(run).map(({ step, text }) => {
      const steps = found[i].get("step");
      const x = this.along === "step" ? step : steps?.x.length ? steps.x[nearest(steps.y, step)] : null;
      return { x, text: `${run.name}: ${text}` };
    })).filter(({ x }) => x !== null);
  }

  /** Return where every run was when the shortest one ended: a heading and a table, of records, not of drawn points. */
  async #same(found) {
    const ends = found.map((of) => Math.max(...[...of.values()].map(({ x }) => x.at(-1) ?? -Infinity))).filter((x) => x > -Infinity);
    if (ends.length < 2) return [];
    const at = Math.min(...ends), title = this.along === "time" ? `after ${duration(at)}` : this.along === "money" ? `at a cost of ${at.toFixed(2)}` : `at ${this.along} ${written(at)}`;
    const metrics = this.metrics.filter(([name]) => found.some((of) => of.get(name)?.x.length));
    const values = await Promise.all(this.runs.map((run) => this.source.values(run.id, metrics.map(([name]) => name), this.along, at * (1 + 1e-9)).catch(() => ({}))));
    const rows = metrics.map(([name, label, unit]) => [label, ...values.map((of) => written(of[name], unit))]);
    return [el("h2", {}, "All of them " + title), table("All of them " + title, ["", ...this.runs.map((run) => run.name)], rows)];
  }

  #recipes() {
    if (this.runs.length < 2) return "";
    const recipes = this.runs.map((run) => run.recipe || {}), keys = [...new Set(recipes.flatMap(Object.keys))].filter((key) => key !== "run.dir");
    const rows = keys.map((key) => [el("code", {}, key), ...recipes.map((recipe) => setting(recipe[key]))]).filter(([, ...values]) => new Set(values).size > 1);
    const live = this.runs.map((run) => changes(run).map(({ step, text }) => `from step ${count(step)} on: ${text}`).join("; "));
    if (new Set(live).size > 1) rows.push(["mixture, while it trained", ...live.map((text) => text || "\u2013")]);
    return el("section", {}, el("h2", {}, rows.length ? "Where the recipes differ" : "Recipes"), rows.length ? table("Where the recipes differ", ["key", ...this.runs.map((run) => run.name)], rows, { className: "wordy" }) : el("p", { class: "quiet" }, "The recipes are the same."));
  }

  /** Return the figures of all runs as a table, but for those that cannot be compared. */
  #figures() {
    const figures = this.runs.map(({ row, summary }) => new Map([["state", summary.ended || row.state], ...summary.figures.filter(({ metric }) => !this.leftOut.has(metric)).map(({ title, value }) => [title, value])]));
    const titles = [...new Set(figures.flatMap((of) => [...of.keys()]))];
    return this.runs.length > 1 ? el("section", {}, el("h2", {}, "Runs"), table("Figures of the runs", ["", ...this.runs.map((run) => run.name)], titles.map((title) => [title, ...figures.map((of) => of.get(title) ?? "\u2013")]))) : "";
  }

  close() {
    this.turn = -1;
    clearTimeout(this.timer);
    this.end?.();
    for (const chart of this.charts) chart.destroy();
  }
}

/** Return the changes of a run's mixture after its start. */
const changes = (run) => (run.events || []).filter(({ kind }) => kind === "mixture");
