// Servers of the command line: their /metrics pages, asked every other second while this view is open.

import * as api from "./api.js";
import { el, failure } from "./dom.js";
import { takeAlong } from "./take.js";
import { Chart } from "../charts/charts.js";

const EVERY_MS = 2000, MOST_POINTS = 3600;

/** Charts in their order. of: [field of a point, label, colour]. */
const CHARTS = [
  { id: "queue", title: "Answers running and waiting", fromZero: true, of: [["running", "running", 0], ["waiting", "waiting", 1]] },
  { id: "rate", title: "Tokens per second", fromZero: true, of: [["answer_tokens_per_s", "of answers", 0], ["computed_tokens_per_s", "computed, prompts too", 2]] },
  { id: "first", title: "Time to the first token", unit: "s", fromZero: true, of: [["first_p50", "half of them within", 0], ["first_p99", "99% within", 1]] },
  { id: "between", title: "Time between tokens", unit: "s", fromZero: true, of: [["between_p50", "half of them within", 0], ["between_p99", "99% within", 1]] },
  { id: "cache", title: "KV cache in use", unit: "share", fromZero: true, of: [["cache", "blocks held", 4]] },
  { id: "drafts", title: "Drafts accepted", unit: "share", fromZero: true, of: [["accepted", "of those guessed", 5]] },
];

export async function open() {
  const { servers } = await api.servers();
  const views = servers.map((server, i) => new ServerView(server, i));
  const root = el("div", { class: "page" }, el("div", { class: "title" }, el("h1", {}, "Servers"), takeAlong(null)),
    servers.length ? views.map((view) => view.root) : el("p", { class: "empty" }, "This console watches no server. Start it with --server URL."));
  return {
    root,
    places: [["#/", "Runs"], ["", "Servers"]],
    begin: () => { for (const view of views) view.run(); },
    close: () => { for (const view of views) view.close(); },
  };
}

class ServerView {
  constructor(server, number) {
    Object.assign(this, { number, points: [], charts: [] });
    this.said = el("p", { class: "quiet", role: "status" }, "Asking\u2026");
    this.places = CHARTS.map(() => el("div", { class: "place" }));
    this.root = el("section", { class: "view", "aria-label": server.name }, el("h2", {}, server.name, " ", el("small", {}, server.url)), this.said, el("div", { class: "charts" }, this.places));
  }

  async run() {
    const last = this.points.length ? this.points[this.points.length - 1].time : -1;
    try {
      const found = await api.server(this.number, last);
      if (this.isClosed) return;
      this.points = [...this.points, ...found.points].slice(-MOST_POINTS);
      if (found.error) this.said.replaceChildren(failure(new Error(found.error)));
      else this.said.textContent = this.points.length < 2 ? "Rates appear with the second reading." : "";
      this.#draw();
    } catch (error) {
      this.said.replaceChildren(failure(error));
    }
    if (!this.isClosed) this.timer = setTimeout(() => this.run(), EVERY_MS);
  }

  #draw() {
    if (!this.points.length) return;
    const first = this.points[0].time;
    for (const [i, { of, ...chart }] of CHARTS.entries()) {
      const layers = of.map(([field, name, color]) => {
        const known = this.points.filter((point) => point[field] !== null && point[field] !== undefined);
        return { name, color, style: "line", x: known.map(({ time }) => time - first), y: known.map((point) => point[field]) };
      });
      const id = `${chart.id}-${this.number}`, drawn = this.charts.find((one) => one.options.id === id);
      if (drawn) drawn.setLayers(layers);
      else if (layers.some(({ x }) => x.length)) this.charts.push(new Chart(this.places[i], { height: 190, ...chart, id, along: "time", layers, sync: `server-${this.number}` }));
    }
  }

  close() {
    this.isClosed = true;
    clearTimeout(this.timer);
    for (const chart of this.charts) chart.destroy();
  }
}
